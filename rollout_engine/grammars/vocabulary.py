"""The tokens of a tokenizer as llguidance reads them, and the grammars compiled for them."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.grammars.sources import FREE_TOKENS, AddedToken, source_of

_LIMITS = {"max_lexer_states": 1 << 15, "step_max_items": 20_000, "verbose_errors": False}
"""Bounds of a grammar's automata, whose states take about 2 KiB each, and of the work of one mask."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot continue; the message is the reason."""


def require_llguidance(given: object) -> ModuleType:
    """Import llguidance. Raises `RequestError`, naming the extra, if it is not installed."""
    try:
        import llguidance
    except ImportError as problem:
        hint = f"pip install 'rollout-engine[grammar]' ({problem})."
        raise RequestError.for_field("structured_outputs", given, "absent: llguidance is not installed", hint) from None
    module: ModuleType = llguidance
    return module


@cache
def executor_of(num_threads: int) -> Any:
    """An `LLExecutor`, which fills the masks of many sequences on threads of its own."""
    return require_llguidance("a grammar").LLExecutor(num_threads)


class StopBits(NamedTuple):
    """The tokens that end a sequence, and others."""

    others: np.ndarray
    """Tokens that end no sequence, as the bits of a mask, uint32 [words]."""
    stops: np.ndarray
    """Tokens that end the sequence, likewise."""
    can_be_told: bytes
    """For each token 1 if a matcher decides without a mask whether it is allowed: it is text, and ends no sequence."""


class Vocabulary:
    """Tokens and their bytes. Raises `GrammarError` for a tokenizer whose tokens' bytes cannot be determined."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: as `tokenizer.json` has it."""
        module = require_llguidance("a grammar")
        content = json.loads(tokenizer)
        content["truncation"] = content["padding"] = None
        added = content.get("added_tokens") or []
        self._added = {token["content"]: AddedToken(token["id"], token["special"]) for token in added}
        try:
            smallest = module.LLTokenizer(json.dumps(content))
            eos = [token_id for token_id in eos_token_ids if token_id < smallest.vocab_size] or None
            size = max(vocab_size, smallest.vocab_size)
            self._tokens = module.LLTokenizer(json.dumps(content), n_vocab=size, eos_token=eos)
        except Exception as problem:
            what = "the bytes of the tokenizer's tokens cannot be told; byte-level tokenizers and those with"
            raise GrammarError(f"{what} byte fallback do ({problem})") from problem
        self.num_words = -(-size // 32)
        """Words of 32 bits in a mask."""
        self.eos_token_ids = list(self._tokens.eos_tokens)
        """Tokens whose bits llguidance sets when a grammar accepts."""
        self._limits = module.LLParserLimits(**_LIMITS)
        self._bits: dict[tuple[int, ...], StopBits] = {}
        self._is_text = np.array([self._has_text(token_id) for token_id in range(size)])

    def stop_bits(self, stop_ids: tuple[int, ...]) -> StopBits:
        """The bits of a sequence that these tokens end."""
        found = self._bits.get(stop_ids)
        if found is None:
            stops, ends = (np.zeros(self.num_words * 32, np.bool_) for _ in range(2))
            stops[list(stop_ids)] = True
            ends[[*stop_ids, *self.eos_token_ids]] = True
            others, stop_bits = (np.packbits(each, bitorder="little").view(np.uint32) for each in (~ends, stops))
            can_be_told = (self._is_text & ~ends[: len(self._is_text)]).tobytes()
            found = self._bits[stop_ids] = StopBits(others, stop_bits, can_be_told)
        return found

    def compile(self, given: Mapping[str, Any]) -> Any:
        """An `LLMatcher` at the beginning of the grammar. Raises `GrammarError`."""
        module = require_llguidance(given)
        try:
            source = source_of(given, self._added)
            matcher = module.LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        except Exception as problem:
            raise GrammarError(str(problem)) from problem
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error()))
        return matcher

    def _has_text(self, token_id: int) -> bool:
        """Whether a token is text that is not empty, and no special token."""
        text: bytes = self._tokens.decode_bytes([token_id])
        is_named = text == b"<[%d]>" % token_id  # llguidance writes a token without text so
        return bool(text) and not is_named and not self._tokens.is_special_token(token_id)


def readable(error: str) -> str:
    """The lines of llguidance's error that are for users, as one."""
    text = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    _, of_schema, problem = text.rpartition("failed to compile JSON schema: ")
    shown = r" *\d+ \|| *\^" if of_schema else rf" *\d+ \| {re.escape(FREE_TOKENS)}"  # lines of a grammar that is ours
    lines = [line for line in problem.splitlines() if not re.match(shown, line)]
    text = " ".join(" ".join(lines).split())[:400]
    if text.startswith("NoExtension"):
        return "no output has this form, or goes on from here"
    text = text.replace("Enable 'coerce_one_of' option", "Give the schema 'x-guidance': {'coerce_one_of': True}")
    return text or "no reason given"
