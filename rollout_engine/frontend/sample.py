"""One sample of a request while it grows: columns, version spans, text."""

from array import array

import numpy as np

from rollout_engine.frontend.detokenizer import Detokenizer
from rollout_engine.messages import EngineCoreOutput
from rollout_engine.outputs import CompletionOutput, FinishReason, VersionSpan
from rollout_engine.sampling_params import SamplingParams


class Sample:
    """Collects the `EngineCoreOutput`s of one sequence and renders `CompletionOutput`s."""

    def __init__(self, index: int, seed: int, params: SamplingParams, text: Detokenizer | None) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._seed = seed
        self._text = text
        self._token_ids: list[int] = []
        self._logprobs = None if params.logprobs is None else array("f")
        self._cumulative_logprob = 0.0
        self._top_logprobs = TopLogprobs(params.logprobs) if params.logprobs else None
        self._kept_logprob_mass = array("f") if params.truncates else None
        self._spans: list[VersionSpan] = []
        self._num_rendered_tokens = self._num_rendered_chars = 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Take what one step brought. True: a stop string ended the sample, and the core need not go on with it."""
        new, text = output.new_token_ids, self._text
        if new:
            self._append(output, len(new) if text is None else text.push(new))
        if text is not None and output.finish_reason is not None:
            text.finish()
        if text is not None and text.stop is not None:
            self.finish_reason, self._stop_reason = "stop", text.stop
            return True
        self.finish_reason, self._stop_reason, self._error = output.finish_reason, output.stop_reason, output.error
        return False

    def render(self, *, only_new: bool) -> CompletionOutput:
        """The sample so far, or what is new since the last call. Positions in spans count from the start either way."""
        start = self._num_rendered_tokens if only_new else 0
        first_char = self._num_rendered_chars if only_new else 0
        text = "" if self._text is None else self._text.text()
        self._num_rendered_tokens, self._num_rendered_chars = len(self._token_ids), len(text)
        return CompletionOutput(
            index=self.index,
            text=text[first_char:],
            token_ids=self._token_ids[start:],
            logprobs=_from(start, self._logprobs),
            top_logprobs=None if self._top_logprobs is None else self._top_logprobs.stacked(start),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            kept_logprob_mass=_from(start, self._kept_logprob_mass),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            version_spans=_spans_from(start, self._spans),
            seed=self._seed,
            error=self._error,
        )

    def _append(self, output: EngineCoreOutput, count: int) -> None:
        """Keep the first `count` of the new tokens, in every column."""
        self._append_span(len(self._token_ids), count, output.policy_version, output.kv_min_version)
        self._token_ids += output.new_token_ids[:count]
        if self._logprobs is not None:
            assert output.new_logprobs is not None, f"{output.request_id} asked for log-probs and got none"
            self._logprobs.extend(output.new_logprobs[:count])
            self._cumulative_logprob += sum(output.new_logprobs[:count])
        if self._top_logprobs is not None:
            assert output.new_top_logprobs is not None, f"{output.request_id} asked for top log-probs and got none"
            self._top_logprobs.append(*output.new_top_logprobs, count)
        if self._kept_logprob_mass is not None:
            assert output.new_kept_logprob_mass is not None, f"{output.request_id} truncates and got no kept mass"
            self._kept_logprob_mass.extend(output.new_kept_logprob_mass[:count])

    def _append_span(self, start: int, count: int, policy_version: int, kv_min_version: int) -> None:
        """The same versions as before lengthen the last span."""
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.policy_version, last.kv_min_version) == (policy_version, kv_min_version):
            start = self._spans.pop().start
            count += last.end - last.start
        self._spans.append(VersionSpan(start, start + count, policy_version, kv_min_version))


class TopLogprobs:
    """The k most likely tokens at each position, one row a position."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def append(self, ids: np.ndarray, logprobs: np.ndarray, count: int) -> None:
        """Add the first `count` rows of int32 [T, k] ids and float32 [T, k] log-probs."""
        self._ids.extend(ids[:count])
        self._logprobs.extend(logprobs[:count])

    def stacked(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """(int32 [T, k], float32 [T, k]) of positions from `start` on."""
        shape = (len(self._ids) - start, self._k)
        ids = np.array(self._ids[start:], dtype=np.int32).reshape(shape)
        return ids, np.array(self._logprobs[start:], dtype=np.float32).reshape(shape)


def _from(start: int, column: "array[float] | None") -> np.ndarray | None:
    return None if column is None else np.array(column[start:], dtype=np.float32)


def _spans_from(start: int, spans: list[VersionSpan]) -> list[VersionSpan]:
    return [
        VersionSpan(max(span.start, start), span.end, span.policy_version, span.kv_min_version)
        for span in spans
        if span.end > start
    ]
