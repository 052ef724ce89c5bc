"""Times requests and their tokens, as their client sees them."""

import time
from collections import Counter
from collections.abc import Iterable

from rollout_engine.base.metrics import RequestStats, staleness
from rollout_engine.base.outputs import FinishReason, RequestMetrics
from rollout_engine.base.sampling_params import SamplingParams


class RequestTimer:
    """Fills the `RequestStats` of one client. While steps sample for the same sequences, it compares a list a step."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self._last_token: dict[int, float] = {}
        """Start time of the last step that sampled a token of each live sequence, by its id, up to the last step."""
        self._of_last_step: tuple[list[int], float] = ([], 0.0)
        """The sequences of the last step, and when it began: not yet in `_last_token`."""

    def record_start(self, metrics: RequestMetrics, start: float) -> None:
        """Record that a step on a request's prompt began at `start`; only the first such step counts."""
        if metrics.scheduled_time is not None:
            return
        metrics.scheduled_time = max(start, metrics.arrival_time)
        self.stats.queue_seconds.observe(metrics.scheduled_time - metrics.arrival_time)

    def tokens(self, sequence_ids: list[int], start: float) -> None:
        """Record one new token for each live sequence, from a step that began at `start` (0: unknown).

        Arrival times would not do: several steps may arrive together.
        """
        at = start or time.monotonic()
        before, last_at = self._of_last_step
        if before == sequence_ids:
            self.stats.inter_token_seconds.observe(at - last_at, len(sequence_ids))
        else:
            self._note_last_step()
            known = [last for last in map(self._last_token.get, sequence_ids) if last is not None]
            for last, times in Counter(known).items() if known else ():
                self.stats.inter_token_seconds.observe(at - last, times)
        self._of_last_step = (sequence_ids, at)

    def record_sequence_end(
        self, sequence_id: int, reason: FinishReason | None, policy_versions: set[int], live_version: int
    ) -> None:
        """Record the end of a sequence. `policy_versions`: those that sampled its tokens."""
        self._note_last_step()
        self._last_token.pop(sequence_id, None)
        assert reason is not None, "ended without a reason"
        self.stats.finished[reason] += 1
        if policy_versions:
            self.stats.staleness.observe(staleness(live_version, policy_versions))

    def record_request_end(
        self, metrics: RequestMetrics, num_prompt_tokens: int, num_generation_tokens: int, params: SamplingParams
    ) -> None:
        """Record the end of a request's last sample."""
        metrics.finished_time = time.monotonic()
        self.stats.request_seconds.observe(metrics.finished_time - metrics.arrival_time)
        self.stats.prompt_tokens.observe(num_prompt_tokens)
        self.stats.generation_tokens.observe(num_generation_tokens)
        if metrics.first_token_time is not None:
            self.stats.time_to_first_token_seconds.observe(metrics.first_token_time - metrics.arrival_time)
        self.stats.asked_samples.observe(params.n)
        if params.max_tokens is not None:
            self.stats.asked_max_tokens.observe(params.max_tokens)
        self._add_phases(metrics, metrics.finished_time, num_generation_tokens, params.n)

    def _add_phases(self, metrics: RequestMetrics, end: float, num_generation_tokens: int, num_samples: int) -> None:
        start, first = metrics.scheduled_time, metrics.first_token_time
        if start is None:
            return
        self.stats.inference_seconds.observe(end - start)
        if first is None:
            return
        self.stats.prefill_seconds.observe(first - start)
        self.stats.decode_seconds.observe(end - first)
        if num_generation_tokens > num_samples:
            self.stats.token_seconds.observe((end - first) * num_samples / (num_generation_tokens - num_samples))

    def forget_sequences(self, sequence_ids: Iterable[int]) -> None:
        """Forget these sequences: no reader is left."""
        self._note_last_step()
        for sequence_id in sequence_ids:
            self._last_token.pop(sequence_id, None)

    def _note_last_step(self) -> None:
        sequence_ids, at = self._of_last_step
        if sequence_ids:
            self._last_token.update(dict.fromkeys(sequence_ids, at))
            self._of_last_step = ([], 0.0)
