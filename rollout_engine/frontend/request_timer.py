"""Times requests and tokens as the front end sees them."""

import time
from collections import Counter
from collections.abc import Iterable

from rollout_engine.metrics import RequestStats, staleness
from rollout_engine.outputs import FinishReason, RequestMetrics


class RequestTimer:
    """Fills one `RequestStats`. A step costs two passes over its sequences, both inside the interpreter's C code."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self._last_token: dict[int, float] = {}
        """Live sequence -> when the last step began that brought it a token."""

    def scheduled(self, metrics: RequestMetrics, start: float) -> None:
        """A step that computes some of a request's prompt began at `start`; the first such step counts."""
        if metrics.scheduled_time is not None:
            return
        metrics.scheduled_time = max(start, metrics.arrival_time)
        self.stats.queue_seconds.observe(metrics.scheduled_time - metrics.arrival_time)

    def tokens(self, sequences: list[int], start: float) -> None:
        """Each of `sequences` has gained one token, in a step that began at `start`, 0 where nobody knows.

        When the token arrived here says less: several steps may arrive together.
        """
        at = start or time.monotonic()
        for last, times in Counter(map(self._last_token.get, sequences)).items():
            if last is not None:
                self.stats.inter_token_seconds.observe(at - last, times)
        self._last_token.update(dict.fromkeys(sequences, at))

    def ended(self, sequence: int, reason: FinishReason | None, policy_versions: set[int], live_version: int) -> None:
        """A sequence will gain no more tokens. `policy_versions` made those that it has."""
        self._last_token.pop(sequence, None)
        assert reason is not None, "ended without a reason"
        self.stats.finished[reason] += 1
        if policy_versions:
            self.stats.staleness.observe(staleness(live_version, policy_versions))

    def finished(self, metrics: RequestMetrics, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """The last sample of a request has ended."""
        metrics.finished_time = time.monotonic()
        self.stats.request_seconds.observe(metrics.finished_time - metrics.arrival_time)
        self.stats.prompt_tokens.observe(num_prompt_tokens)
        self.stats.generation_tokens.observe(num_generation_tokens)
        if metrics.first_token_time is not None:
            self.stats.time_to_first_token_seconds.observe(metrics.first_token_time - metrics.arrival_time)

    def discarded(self, sequences: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for sequence in sequences:
            self._last_token.pop(sequence, None)
