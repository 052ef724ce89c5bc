"""One log line when a batch of work ends."""

import logging
import time
from copy import copy

from rollout_engine.core.stats import CoreStats

logger = logging.getLogger("rollout_engine")


class BatchLog:
    """Measures from the first request that finds the engine idle to the moment it is idle again."""

    def __init__(self, stats: CoreStats) -> None:
        self._stats = stats
        self._before: CoreStats | None = None
        self._start = 0.0
        self._num_requests = 0

    def add_request(self) -> None:
        """A request has been queued."""
        if self._before is None:
            self._before, self._start, self._num_requests = copy(self._stats), time.monotonic(), 0
        self._num_requests += 1

    def end(self) -> None:
        """Nothing is queued any more. Without work since the last line this is a no-op."""
        if self._before is None:
            return
        now, before, self._before = self._stats, self._before, None
        seconds = time.monotonic() - self._start
        num_sampled = now.num_tokens_sampled - before.num_tokens_sampled
        logger.info(
            "%d requests in %.2f s: %d prompt tokens computed, %d tokens cached, %d sampled (%.0f tokens/s), "
            "%d steps, %d preemptions",
            self._num_requests,
            seconds,
            now.num_prompt_tokens_computed - before.num_prompt_tokens_computed,
            now.num_cached_tokens - before.num_cached_tokens,
            num_sampled,
            num_sampled / max(seconds, 1e-9),
            now.num_steps - before.num_steps,
            now.num_preemptions - before.num_preemptions,
        )
