"""What the choice of a replica costs, for each strategy: the decision alone, and with the counting of the request."""

import random
import statistics
import time
from typing import Any

from rollout_engine.fleet.plan.balancer import STRATEGIES, Balancer

_NUM_DECISIONS, _GROUP_SIZE, _PROMPT_LENGTH, _VOCAB_SIZE = 20_000, 8, 512, 50_000
_REQUESTS_PER_REPLICA = 8
"""In flight, one after the other ending at random."""


def measure(num_replicas: int, rounds: int) -> dict[str, Any]:
    """Microseconds of the best round: means of the slowest strategy, and mean and 99th percentile of each."""
    seconds = {name: min((_decide(name, num_replicas) for _ in range(rounds)), key=sum) for name in STRATEGIES}
    with_counts = {name: min(_count(name, num_replicas) for _ in range(rounds)) for name in STRATEGIES}
    means = {name: round(1e6 * statistics.mean(each), 2) for name, each in seconds.items()}
    return {
        "microseconds_per_decision": max(means.values()),
        "microseconds_per_request": round(1e6 * max(with_counts.values()) / _NUM_DECISIONS, 2),
        "mean_microseconds": means,
        "p99_microseconds": {name: round(1e6 * statistics.quantiles(s, n=100)[-1], 2) for name, s in seconds.items()},
    }


def _decide(strategy: str, num_replicas: int) -> list[float]:
    """Seconds of each decision."""
    seconds = []
    work = _Work(strategy, num_replicas)
    for prompt in work.prompts:
        start = time.perf_counter()
        replica = work.balancer.choose(prompt)
        seconds.append(time.perf_counter() - start)
        work.count(replica)
    return seconds


def _count(strategy: str, num_replicas: int) -> float:
    """Seconds of all decisions, and of counting what begins and ends."""
    work = _Work(strategy, num_replicas)
    start = time.perf_counter()
    for prompt in work.prompts:
        work.count(work.balancer.choose(prompt))
    return time.perf_counter() - start


class _Work:
    """A balancer with its fill of requests, and the prompts to come."""

    def __init__(self, strategy: str, num_replicas: int) -> None:
        self._random = random.Random(0)
        self._in_flight: list[tuple[int, int]] = []
        self._limit = _REQUESTS_PER_REPLICA * num_replicas
        self.balancer = Balancer(strategy)
        for replica in range(num_replicas):
            self.balancer.add(replica)
        num_groups = _NUM_DECISIONS // _GROUP_SIZE
        groups = [self._random.choices(range(_VOCAB_SIZE), k=_PROMPT_LENGTH) for _ in range(num_groups)]
        self.prompts = [prompt for prompt in groups for _ in range(_GROUP_SIZE)]
        for prompt in self.prompts[-self._limit :]:
            self.count(self.balancer.choose(prompt))

    def count(self, replica: int) -> None:
        """Begin a request and, once there are enough, end another one."""
        num_kv_tokens = _PROMPT_LENGTH + self._random.randrange(4096)
        self.balancer.began(replica, num_kv_tokens)
        self._in_flight.append((replica, num_kv_tokens))
        if len(self._in_flight) > self._limit:
            last = self._random.randrange(len(self._in_flight))
            self._in_flight[last], ended = self._in_flight[-1], self._in_flight[last]
            self._in_flight.pop()
            self.balancer.ended(*ended)
