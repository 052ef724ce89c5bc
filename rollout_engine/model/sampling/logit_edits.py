"""Edits of logits that a request asks for, applied before a token is drawn.

    penalties -> logit_bias -> logits processors
              -> allowed_token_ids, bad_words, stop ids before min_tokens, grammar -> draw

Masks are applied last, so no edit restores a token that the request forbids. In place of all of them, a token that the
budget of thinking forces is the only one that is left, whatever they forbid. Edits depend on the sequence's params and
tokens only, so the result does not depend on the batch, on preemption or on forks.
"""

from collections.abc import Sequence
from copy import copy

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import error_text
from rollout_engine.base.messages import NewSequence
from rollout_engine.base.thinking import ThinkingState
from rollout_engine.base.user_code import UserCode
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.grammars.state import GrammarState
from rollout_engine.model.sampling.logits_processors import LogitsProcessor, SequenceView
from rollout_engine.model.sampling.penalties import TokenCounts, penalise


class LogitEdits:
    """The edits of one sequence, whose `token_ids` grow in place."""

    def __init__(
        self,
        sequence: NewSequence,
        processors: Sequence[LogitsProcessor],
        vocab_size: int,
        sibling: "LogitEdits | None" = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`sibling`: edits of a sequence with the same params, whose columns of token ids this one shares.

        `grammars`: compiles the grammars of structured outputs.
        """
        params = sequence.params
        self.sequence = sequence
        self.counts = TokenCounts(sequence.token_ids[: sequence.num_prompt_tokens]) if params.penalises else None
        self.bias: tuple[np.ndarray, np.ndarray] | None = (
            _as_columns(params.logit_bias) if sibling is None else sibling.bias
        )
        """Token ids int64 and their biases float32."""
        self.allowed: np.ndarray | None = _distinct(params.allowed_token_ids) if sibling is None else sibling.allowed
        """int64, ascending."""
        self.stop_ids = [t for t in (*sequence.eos_token_ids, *(params.stop_token_ids or ())) if t < vocab_size]
        self._failure: str | None = None
        self._processors = [processor for processor in processors if self._is_wanted(processor)]
        self.grammar = None
        self.draft: list[int] = []
        """The last tokens of the sequence that are drafted, and may be rejected."""
        if params.structured_outputs is not None:
            assert grammars is not None, "every engine has a compiler of grammars"
            grammar = grammars.grammar(params.structured_outputs)
            self.grammar = GrammarState(grammar, sequence.num_prompt_tokens, self.stop_ids)
        budget = sequence.thinking
        self.thinking = None if budget is None else ThinkingState(budget, sequence.num_prompt_tokens)
        some = self.counts, self.bias, self.allowed, sequence.bad_words or None
        others_last = self.sees_drawn_tokens_alone or any(each is not None for each in some)
        self.lasts = others_last or self.grammar is not None
        """Whether every token is edited, not only those before `min_tokens` or those that a budget forces."""
        others = others_last or params.min_tokens > 0 or self.thinking is not None
        self.edits_beside_grammar = others or self.grammar is None
        """Whether `apply` may do anything."""

    @classmethod
    def of(
        cls,
        sequence: NewSequence,
        processors: Sequence[LogitsProcessor],
        vocab_size: int,
        sibling: "LogitEdits | None" = None,
        grammars: GrammarCompiler | None = None,
    ) -> "LogitEdits | None":
        """The edits of a sequence; None if its logits are never edited. Arguments as for the class."""
        edits = cls(sequence, processors, vocab_size, sibling, grammars)
        return edits if edits.lasts or sequence.params.min_tokens or edits.thinking is not None else None

    @property
    def sees_drawn_tokens_alone(self) -> bool:
        """Whether a logits processor edits the row, or has failed: it is shown no token that was not drawn."""
        return bool(self._processors) or self._failure is not None

    @property
    def need_host(self) -> bool:
        """Whether the host takes part in the draw: logits processors, grammars and budgets are there."""
        return self.grammar is not None or self.thinking is not None or self.sees_drawn_tokens_alone

    def behind(self, draft: list[int]) -> "LogitEdits":
        """The edits of the token behind some more tokens, which are drafted and may be rejected.

        Not allowed if a logits processor edits the row.
        """
        assert not self.sees_drawn_tokens_alone, "a logits processor sees drawn tokens alone"
        made, tokens = copy(self), self.sequence.token_ids
        made.draft = draft
        made.sequence = msgspec.structs.replace(self.sequence, token_ids=tokens + draft)
        if self.counts is not None:
            self.counts.follow(tokens)
            made.counts = self.counts.behind(draft)
        if self.thinking is not None:
            made.thinking = self.thinking.fork()
        return made

    def active_at(self, position: int) -> bool:
        """Whether the logits of the token at `position` of the sequence are edited.

        Perhaps so, if the tokens before it are not known yet.
        """
        if self.lasts or position - self.sequence.num_prompt_tokens < self.sequence.params.min_tokens:
            return True
        return self.thinking is not None and self.thinking.may_force(self.sequence.token_ids, position)

    @property
    def are_active(self) -> bool:
        """Whether the logits of the next token are edited."""
        return self.active_at(len(self.sequence.token_ids))

    def _is_wanted(self, processor: LogitsProcessor) -> bool:
        try:
            with self._watch_call(processor, "wants"):
                return processor.wants(self.sequence.params)
        except (Exception, SystemExit) as problem:  # the request fails when a token is drawn
            self._failure = _blame(processor, "wants", problem)
            return False

    def apply(self, logits: Tensor) -> str | None:
        """Edit one row, `logits` float32 [V], in place. Returns why the row cannot be sampled, or None.

        Without the mask of the grammar, which `row_edits.edit` applies to all rows at once.
        """
        if self._failure is not None:
            return self._failure
        row = logits.numpy()
        if self._force(row):
            return None
        if self.counts is not None:
            self.counts.follow(self.sequence.token_ids)
            penalise(row, self.counts, self.sequence.params)
        if self.bias is not None:
            ids, values = self.bias
            row[ids] += values
        for processor in self._processors:
            failure = self._process(processor, logits)
            if failure is not None:
                return failure
        self._mask(row)
        return None

    def _force(self, row: np.ndarray) -> bool:
        """Leave the token alone that the budget of thinking forces; returns whether it forces one."""
        token_id = None if self.thinking is None else self.thinking.next_forced(self.sequence.token_ids)
        if token_id is None:
            return False
        kept = row[token_id]
        row.fill(-np.inf)
        row[token_id] = kept
        return True

    def _process(self, processor: LogitsProcessor, logits: Tensor) -> str | None:
        sequence = self.sequence
        view = SequenceView(tuple(sequence.token_ids), sequence.num_prompt_tokens, sequence.params)
        try:
            with torch.no_grad():
                with self._watch_call(processor, "apply"):
                    result = processor.apply(logits, view)
                if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
                    got = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else f"{result!r:.60}"
                    raise TypeError(f"it must return floating logits [{len(logits)}], not {got}")
                logits.copy_(result)
        except (Exception, SystemExit) as problem:  # the user's code fails its own request only
            return _blame(processor, "apply", problem)
        return None if bool((logits < torch.inf).all()) else _blame(processor, "apply", "it returned NaN or +inf")

    def _watch_call(self, processor: LogitsProcessor, method: str) -> UserCode:
        return UserCode(lambda: f"{_name(processor)} ({method}, sequence {self.sequence.sequence_id})")

    def _mask(self, logits: np.ndarray) -> None:
        if self.allowed is not None:
            kept = logits[self.allowed]
            logits.fill(-np.inf)
            logits[self.allowed] = kept
        if self.sequence.bad_words:
            logits[self._words_completed_by()] = -np.inf
        if self._num_output_tokens < self.sequence.params.min_tokens:
            logits[self.stop_ids] = -np.inf

    @property
    def drawn_token_ids(self) -> list[int]:
        """The sequence's tokens without the draft."""
        token_ids = self.sequence.token_ids
        return token_ids[: len(token_ids) - len(self.draft)] if self.draft else token_ids

    @property
    def _num_output_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens

    def _words_completed_by(self) -> list[int]:
        """Tokens that would complete a bad word whose other tokens end the output."""
        output, num = self.sequence.token_ids, self._num_output_tokens
        return [
            word[-1]
            for word in self.sequence.bad_words
            if len(word) == 1 or (len(word) <= num + 1 and output[1 - len(word) :] == word[:-1])
        ]


def _as_columns(bias: dict[int, float] | None) -> tuple[np.ndarray, np.ndarray] | None:
    if not bias:
        return None
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def _distinct(token_ids: list[int] | None) -> np.ndarray | None:
    return None if token_ids is None else np.unique(token_ids)


def _blame(processor: LogitsProcessor, method: str, problem: BaseException | str) -> str:
    what = problem if isinstance(problem, str) else error_text(problem)
    return f"{_name(processor)} failed in {method}: {what}."


def _name(processor: LogitsProcessor) -> str:
    kind = type(processor)
    return f"logits processor {kind.__module__}:{kind.__qualname__}"
