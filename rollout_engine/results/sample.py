"""Gathers one sample of a request: its tokens' columns, version spans and text."""

import time
from array import array
from collections.abc import Callable, Sized
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from rollout_engine.base.hidden_states import as_float32
from rollout_engine.base.messages import SequenceEnd
from rollout_engine.base.outputs import CompletionOutput, FinishReason, Quantization, RequestMetrics, VersionSpan
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.thinking import Thinking, ThinkingState
from rollout_engine.results.support_column import SupportColumn
from rollout_engine.text.detokenizer import Detokenizer

_T = TypeVar("_T")


class RoutedColumn:
    """Experts of every token of prompt and completion but the last."""

    def __init__(self) -> None:
        self._prompt: np.ndarray | None = None
        self._rows: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, rows: np.ndarray) -> None:
        """Set those of the prompt's tokens but the last, [P - 1, L, k]. The first that come stay."""
        if self._prompt is None:
            self._prompt = rows

    def append(self, row: np.ndarray) -> None:
        """Add those of one more token, [L, k]: of the one before a sampled token."""
        self._rows.append(row)

    def stack(self, start: int) -> np.ndarray | None:
        """Those that came with the sampled tokens from `start` on, the prompt's with the first: [n, L, k].

        None if no token was sampled.
        """
        if not self._rows:
            return None
        assert self._prompt is not None, "they come with the first token"
        rows = np.array(self._rows[start:], self._prompt.dtype).reshape(-1, *self._prompt.shape[1:])
        return rows if start else np.concatenate([self._prompt, rows])


class Sample:
    """Collects a sequence's tokens from the steps and renders `CompletionOutput`s."""

    __slots__ = (
        *("_asked_ids", "_cumulative_logprob", "_entropies", "_hidden_states", "_id_logprobs", "_index"),
        "_kept_logprob_mass",
        *("_kv_min_version", "_logprobs", "_metrics", "_num_read", "_num_rendered_chars", "_num_summed"),
        *("_policy_version", "_quantization", "_routed_experts", "_sampled_ranks", "_seed", "_spans"),
        *("_forced", "_stop_reason", "_support", "_text", "_thinking", "_token_ids", "_top_logprobs", "_undecodable"),
        *("error", "finish_reason", "is_watched", "num_rendered"),
    )

    def __init__(
        self,
        index: int,
        seed: int,
        params: SamplingParams,
        text: Detokenizer | None,
        metrics: RequestMetrics,
        quantization: Quantization | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        """`quantization`: that of the engine. `thinking`: the request's budget."""
        self.is_watched = params.output_kind != "final_only" or params.stops_on_text
        """Whether each token matters on arrival: the request streams, or its text may stop it."""
        self._index = index
        self._seed = seed
        self._quantization = quantization
        self._text = text
        self._undecodable: str | None = None
        """Why it has no text, if the tokenizer raised."""
        self._metrics = metrics
        self.finish_reason: FinishReason | None = None
        """Why it has ended; None while it grows."""
        self._stop_reason: int | str | None = None
        self.error: str | None = None
        """Why it failed, if it has."""
        self._token_ids: list[int] = []
        self._logprobs: Any = None if params.logprobs is None else array("f")
        self._top_logprobs = _top_column(params)
        self._sampled_ranks = array("i") if params.wants_ranks else None
        self._asked_ids = params.logprob_token_ids or None
        self._id_logprobs: list[np.ndarray] | None = None if self._asked_ids is None else []
        self._kept_logprob_mass = array("f") if params.truncates else None
        self._routed_experts = RoutedColumn() if params.return_routed_experts else None
        self._support = SupportColumn(params.n) if params.return_support else None
        self._entropies = array("f") if params.entropy else None
        self._hidden_states: list[np.ndarray] | None = None if params.return_hidden_states is None else []
        self._thinking = None if thinking is None else ThinkingState(thinking, 0)
        self._forced: list[bool] = []
        """Which of the tokens that were rendered are forced, with a budget."""
        self._policy_version = self._kv_min_version = -1
        self._spans: list[tuple[int, int, int]] = []
        """(first token, policy_version, kv_min_version); each ends where the next starts."""
        self._cumulative_logprob = 0.0
        self._num_read = self._num_summed = self._num_rendered_chars = 0
        self.num_rendered = 0
        """Number of tokens in the last output."""

    @property
    def policy_versions(self) -> set[int]:
        """Policy versions that sampled its tokens."""
        return {policy_version for _, policy_version, _ in self._spans}

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self._token_ids)

    def append(self, token_id: int, logprob: float | None, policy_version: int, kv_min_version: int) -> None:
        """Add one token."""
        if kv_min_version != self._kv_min_version or policy_version != self._policy_version:
            self._start_span(policy_version, kv_min_version)
        self._token_ids.append(token_id)
        if self._logprobs is not None:
            self._logprobs.append(logprob)

    def append_top(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Add the most likely tokens at the last token's position, if asked for."""
        if self._top_logprobs is not None:
            self._top_logprobs.append(ids, logprobs)

    def append_rank(self, rank: int) -> None:
        """Add the last token's rank, if asked for."""
        if self._sampled_ranks is not None:
            self._sampled_ranks.append(rank)

    def append_id_logprobs(self, logprobs: np.ndarray) -> None:
        """Add log-probs at the last token's position: of the whole vocabulary, or of the ids asked for."""
        if isinstance(self._top_logprobs, AllLogprobs):
            self._top_logprobs.append_all(logprobs)
            logprobs = logprobs[self._asked_ids or []]
        if self._id_logprobs is not None:
            self._id_logprobs.append(logprobs)

    def append_kept_mass(self, mass: float) -> None:
        """Add the last token's kept mass, if asked for."""
        if self._kept_logprob_mass is not None:
            self._kept_logprob_mass.append(mass)

    def begin_routed(self, rows: np.ndarray) -> None:
        """Set the experts of the prompt's tokens but the last, if asked for; the first that arrive stay."""
        if self._routed_experts is not None:
            self._routed_experts.begin(rows)

    def append_routed(self, row: np.ndarray) -> None:
        """Add the experts of the token before the last one, if asked for."""
        if self._routed_experts is not None:
            self._routed_experts.append(row)

    def append_support(self, ids: np.ndarray) -> bool:
        """Add the ids that the last token was drawn from, if asked for. Returns whether they are too many."""
        if self._support is None:
            return False
        self._support.append(ids)
        return self._support.error is not None

    def append_entropy(self, entropy: float) -> None:
        """Add the entropy of the distribution that the last token was drawn from, if asked for."""
        if self._entropies is not None:
            self._entropies.append(entropy)

    def append_hidden_state(self, row: np.ndarray) -> None:
        """Add the state [H] from which the last token was drawn, if asked for."""
        if self._hidden_states is not None:
            self._hidden_states.append(row)

    def read_text(self) -> bool:
        """Decode the new tokens. Returns whether the text, a failure to decode it, or a support that is too large has
        ended the sample, so that the core can abort it."""
        if self._text is not None:
            new, self._num_read = self._token_ids[self._num_read :], len(self._token_ids)
            self._try_decode(partial(self._text.push, new))
        return self._is_ended_here()

    def finish(self, end: SequenceEnd) -> None:
        """Record that the core has ended the sequence."""
        self.finish_reason, self._stop_reason, self.error = end.finish_reason, end.stop_reason, end.error
        self.read_text()
        if self._text is not None:
            self._try_decode(self._text.finish)
        self._is_ended_here()

    def render(self, *, only_new: bool) -> CompletionOutput:
        """Render the sample, or the news since the last call. Spans count positions from the start either way."""
        start = self.num_rendered if only_new else 0
        first_char = self._num_rendered_chars if only_new else 0
        text = "" if self._text is None else self._try_decode(self._text.text) or ""
        self.num_rendered, self._num_rendered_chars = len(self._token_ids), len(text)
        return self._render(start, text[first_char:])

    def part(self, start: int) -> CompletionOutput:
        """Render the tokens from `start` on, without text, and without an effect on `render`: for `restore`."""
        return self._render(start, "")

    def restore(self, part: CompletionOutput) -> None:
        """Append tokens that an earlier process sampled, and their values, as its `part` returned them."""
        num_tokens = len(part.token_ids)
        for span in part.version_spans:
            if (span.policy_version, span.kv_min_version) != (self._policy_version, self._kv_min_version):
                self._policy_version, self._kv_min_version = span.policy_version, span.kv_min_version
                self._spans.append((span.start, span.policy_version, span.kv_min_version))
        self._token_ids += part.token_ids
        for column, values in (
            (self._logprobs, part.logprobs),
            (self._kept_logprob_mass, part.kept_logprob_mass),
            (self._entropies, part.entropies),
            (self._sampled_ranks, part.sampled_ranks),
            (self._id_logprobs, part.token_id_logprobs),
        ):
            if column is not None and values is not None:
                column.extend(values.tolist() if isinstance(column, array) else values)
        if self._top_logprobs is not None and part.top_logprobs is not None:
            self._top_logprobs.restore(*part.top_logprobs)
        if self._support is not None and part.support is not None:
            for first, end in pairwise(part.support[0].tolist()):
                self._support.append(part.support[1][first:end])
        if self._routed_experts is not None and part.routed_experts is not None:
            self._routed_experts.begin(part.routed_experts[:-num_tokens])
            for row in part.routed_experts[-num_tokens:]:
                self._routed_experts.append(row)
        if part.finish_reason is not None:
            stop = part.stop_reason if isinstance(part.stop_reason, int) else None
            self.finish(SequenceEnd(-1, part.finish_reason, stop, part.error))

    def _render(self, start: int, text: str) -> CompletionOutput:
        num_tokens = len(self._token_ids)
        columns: tuple[Sized | None, ...] = (
            *(self._logprobs, self._top_logprobs, self._kept_logprob_mass),
            *(self._sampled_ranks, self._id_logprobs, self._routed_experts, self._support),
            *(self._entropies, self._hidden_states),
        )
        for column in columns:
            assert column is None or len(column) == num_tokens, f"{len(column)} values for {num_tokens} tokens"
        forced = None if self._thinking is None else self._forced_from(self._thinking, start)
        kept_mass = _from(start, self._kept_logprob_mass)
        if kept_mass is not None and forced is not None:
            kept_mass[forced] = 0.0  # the budget left one token, and truncation cut none
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=self._token_ids[start:],
            logprobs=_from(start, self._logprobs),
            top_logprobs=None if self._top_logprobs is None else self._top_logprobs.stack(start),
            cumulative_logprob=None if self._logprobs is None else self._sum_logprobs(),
            kept_logprob_mass=kept_mass,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            version_spans=self._spans_from(start),
            seed=self._seed,
            error=self.error,
            sampled_ranks=None if self._sampled_ranks is None else np.array(self._sampled_ranks[start:], np.int32),
            token_id_logprobs=self._id_logprobs_from(start),
            routed_experts=None if self._routed_experts is None else self._routed_experts.stack(start),
            quantization=self._quantization,
            support=None if self._support is None else self._support.stack(start),
            entropies=_from(start, self._entropies),
            hidden_states=self._hidden_states_from(start),
            forced=forced,
        )

    def _forced_from(self, thinking: ThinkingState, start: int) -> np.ndarray:
        self._forced += [thinking.append(token_id) for token_id in self._token_ids[len(self._forced) :]]
        return np.array(self._forced[start:], np.bool_)

    def _id_logprobs_from(self, start: int) -> np.ndarray | None:
        if self._id_logprobs is None or self._asked_ids is None:
            return None
        shape = len(self._id_logprobs) - start, len(self._asked_ids)
        return np.array(self._id_logprobs[start:], dtype=np.float32).reshape(shape)

    def _hidden_states_from(self, start: int) -> np.ndarray | None:
        if not self._hidden_states:
            return None
        rows = self._hidden_states[start:]
        return as_float32(np.array(rows, self._hidden_states[0].dtype).reshape(len(rows), -1)) if rows else None

    def _is_ended_here(self) -> bool:
        """Record and return whether a stop string or pattern, a failure to decode, or a support that is too large has
        ended the sample."""
        error = self._undecodable if self._text is None else self._text.error
        if error is None and self._support is not None:
            error = self._support.error
        if error is not None:
            self.finish_reason, self._stop_reason, self.error = "error", None, error
        elif self._text is not None and self._text.stop is not None:
            self.finish_reason, self._stop_reason, self.error = "stop", self._text.stop, None
        else:
            return False
        return True

    def _try_decode(self, decode: Callable[[], _T]) -> _T | None:
        """Call `decode`. If it raises, the sample fails: its tokens stay, its text is empty."""
        try:
            return decode()
        except Exception as problem:  # the tokenizer may be the user's own; other samples continue
            what = f"the tokenizer cannot decode its tokens: {type(problem).__name__}: {problem}"
            self._undecodable = f"{what}. SamplingParams(detokenize=False) does without text."
            self._text = None
            return None

    def _start_span(self, policy_version: int, kv_min_version: int) -> None:
        self._policy_version, self._kv_min_version = policy_version, kv_min_version
        self._spans.append((len(self._token_ids), policy_version, kv_min_version))
        if self._metrics.first_token_time is None:  # every first token starts a span
            self._metrics.first_token_time = time.monotonic()

    def _spans_from(self, start: int) -> list[VersionSpan]:
        ends = (len(self._token_ids), 0, 0)
        return [
            VersionSpan(max(first, start), end, policy_version, kv_min_version)
            for (first, policy_version, kv_min_version), (end, _, _) in pairwise([*self._spans, ends])
            if end > start
        ]

    def _sum_logprobs(self) -> float:
        for logprob in self._logprobs[self._num_summed :]:
            self._cumulative_logprob += logprob
        self._num_summed = len(self._logprobs)
        return self._cumulative_logprob


class TopLogprobs:
    """The k most likely tokens at each position, one row per position."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Add a position: int32 [K] ids and float32 [K] log-probs, most likely first, of which k are kept."""
        self._ids.append(ids[: self._k])
        self._logprobs.append(logprobs[: self._k])

    def restore(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Add positions that another one's `stack` returned."""
        self._k = ids.shape[1]
        self._ids += [*ids]
        self._logprobs += [*logprobs]

    def stack(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [T, k], log-probs float32 [T, k]) of positions from `start` on."""
        shape = (len(self._ids) - start, self._k)
        ids = np.array(self._ids[start:], dtype=np.int32).reshape(shape)
        return ids, np.array(self._logprobs[start:], dtype=np.float32).reshape(shape)


class AllLogprobs(TopLogprobs):
    """All tokens of the vocabulary at each position, most likely first, ties to the lowest id."""

    def __init__(self) -> None:
        super().__init__(0)

    def append(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Do nothing: these were asked for by another request of the step."""

    def append_all(self, logprobs: np.ndarray) -> None:
        """Add a position: float32 [V] log-probs by token id."""
        self._k = len(logprobs)
        ids = np.argsort(-logprobs, kind="stable").astype(np.int32)
        super().append(ids, logprobs[ids])


def _top_column(params: SamplingParams) -> TopLogprobs | None:
    if params.logprobs == -1:
        return AllLogprobs()
    return TopLogprobs(params.logprobs) if params.logprobs else None


def _from(start: int, column: "array[float] | None") -> np.ndarray | None:
    return None if column is None else np.array(column[start:], dtype=np.float32)
