"""The tokens of a tokenizer as llguidance reads them, and the grammars compiled for them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.grammars.native import NativeTokens, is_text, names_of, native_tokens
from rollout_engine.grammars.sources import FREE_TOKENS, AddedToken, source_of

_LIMITS = {"max_lexer_states": 1 << 15, "step_max_items": 20_000, "verbose_errors": False}
"""Bounds of a grammar's automata, whose states take about 2 KiB each, and of the work of one mask."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or does not go on; the message says why."""


def require_llguidance(given: object) -> ModuleType:
    """The package. Raises `RequestError`, naming the extra, where it is not installed."""
    try:
        import llguidance
    except ImportError as problem:
        hint = f"pip install 'rollout-engine[grammar]' ({problem})."
        raise RequestError.for_field("structured_outputs", given, "absent: llguidance is not installed", hint) from None
    module: ModuleType = llguidance
    return module


class MaskBits:
    """Tokens as the bits of a mask, uint32 [words]."""

    def __init__(self, text: np.ndarray, stops: np.ndarray) -> None:
        self.text = text
        """Tokens that end no sequence."""
        self.stops = stops
        """Tokens that end the sequence."""
        self.text_address, self.stops_address = text.ctypes.data, stops.ctypes.data


class Vocabulary:
    """Tokens and their bytes. Raises `GrammarError` for a tokenizer whose tokens have none that can be told."""

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
        """Tokens whose bits llguidance sets where a grammar accepts."""
        self._limits = module.LLParserLimits(**_LIMITS)
        self._bits: dict[tuple[int, ...], MaskBits] = {}

    @cached_property
    def native(self) -> NativeTokens | None:
        """The tokens as C++ reads them; None where grammars are followed in Python."""
        return native_tokens(self._tokens, self._names, _LIMITS, self._limits)

    @cached_property
    def plain(self) -> np.ndarray:
        """The tokens that are text, as a mask, uint32 [words]."""
        is_plain = np.zeros(self.num_words * 32, np.uint8)
        is_plain[: len(self._names)] = [is_text(name) for name in self._names]
        return np.packbits(is_plain, bitorder="little").view(np.uint32)

    @cached_property
    def _names(self) -> list[bytes]:
        return names_of(self._tokens)

    def bits(self, stop_ids: tuple[int, ...]) -> MaskBits:
        """The bits of the tokens that end a sequence, and of the others."""
        found = self._bits.get(stop_ids)
        if found is None:
            found = self._bits[stop_ids] = self._made_bits(stop_ids)
        return found

    def _made_bits(self, stop_ids: tuple[int, ...]) -> MaskBits:
        stops, ends = (np.zeros(self.num_words * 32, np.uint8) for _ in range(2))
        stops[list(stop_ids)] = 1
        ends[[*stop_ids, *self.eos_token_ids]] = 1
        stop_bits, end_bits = (np.packbits(each, bitorder="little").view(np.uint32) for each in (stops, ends))
        return MaskBits(~end_bits, stop_bits)

    def compile(self, given: Mapping[str, Any]) -> Any:
        """An `LLMatcher` at the beginning of the grammar. Raises `GrammarError`."""
        module = require_llguidance(given)
        return self._compile_checked(
            given, lambda source: module.LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        )

    def begin(self, given: Mapping[str, Any]) -> Any:
        """A `NativeMatcher` at the beginning of the grammar, or an `LLMatcher` where `native` is None.

        Raises `GrammarError`.
        """
        return self.compile(given) if self.native is None else self._compile_checked(given, self.native.compile)

    def _compile_checked(self, given: Mapping[str, Any], compiled: Callable[[str], Any]) -> Any:
        try:
            matcher = compiled(source_of(given, self._added))
        except Exception as problem:
            raise GrammarError(str(problem)) from problem
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error()))
        return matcher


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
