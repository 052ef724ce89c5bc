"""Chooses the replica of a fleet for each request: from local counts alone, without a scan over the replicas.

The n samples of a prompt are one request, so they stay together. The same calls lead to the same decisions in every
process.
"""

import struct
from collections import Counter
from collections.abc import Container, Sequence
from typing import Literal, get_args

import msgspec

from rollout_engine.base.errors import ConfigError, refused, unknown_name
from rollout_engine.fleet.plan.replica_loads import ReplicaLoads
from rollout_engine.fleet.plan.strategies import Homes, LeastLoaded, PrefixAware, RoundRobin, Strategy

StrategyName = Literal["prefix-aware", "requests", "kv-cache", "round-robin"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


class BalancerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions since start, and the requests in flight now."""

    decisions: dict[str, int]
    """Counts by decider: a strategy's name, or "session"."""
    num_fallbacks: int
    """Decisions that the first strategy passed on."""
    num_requests: dict[int, int]
    """Replica -> requests in flight, for each one that serves or still has some."""
    num_kv_tokens: dict[int, int]
    """Replica -> KV tokens of those requests, as passed to `began`."""


class Balancer:
    """Chooses among the replicas that serve, by strategies in fallback order.

    * `"prefix-aware"`: the replica of the first prompt with the same `prefix_length` first tokens. A new prefix
      is placed by consistent hashing, on a replica with no more requests than the mean. It passes when that replica is
      overloaded. Choose `prefix_length` longer than the prefix that all prompts share, such as a system prompt.
    * `"requests"`: the replica with the fewest requests in flight.
    * `"kv-cache"`: the replica with the fewest KV tokens in flight.
    * `"round-robin"`: each in turn. It passes when the next one is overloaded.

    A replica is overloaded if it has more than `overload_threshold` x (mean + 8) requests. `"requests"` and
    `"kv-cache"` take the least loaded one and never pass; if all strategies pass, `"requests"` decides.
    """

    def __init__(
        self,
        strategies: StrategyName | Sequence[StrategyName] = ("prefix-aware", "requests"),
        *,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> None:
        names = _check_strategies(strategies)
        if type(prefix_length) is not int or prefix_length < 1:
            raise ConfigError(refused("prefix_length", prefix_length, "an int of at least 1"))
        if type(overload_threshold) not in (int, float) or not overload_threshold >= 1:
            raise ConfigError(refused("overload_threshold", overload_threshold, "a number of at least 1"))
        self._prefix_length = prefix_length
        self._requests, self._kv_tokens = ReplicaLoads(), ReplicaLoads()
        self._strategies = {name: self._make(name, overload_threshold) for name in names}
        self._sessions = Homes(self._requests)
        self._decisions: Counter[str] = Counter()

    def add(self, replica: int) -> None:
        """Let `replica`, a number of at least 0, serve. Its requests in flight from before its removal still count."""
        self._requests.serve(replica)
        self._kv_tokens.serve(replica)
        for strategy in self._strategies.values():
            strategy.add(replica)

    def remove(self, replica: int) -> None:
        """Choose `replica` no longer. Its requests in flight count until `ended` is called for each."""
        self._requests.retire(replica)
        self._kv_tokens.retire(replica)
        for strategy in self._strategies.values():
            strategy.remove(replica)

    def choose(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        session_id: str | None = None,
        excluding: Container[int] = (),
    ) -> int:
        """Choose the replica of one request; call `began` when it is sent. Raises `LookupError` if none is left.

        A session stays at the replica of its first turn, however loaded, until that replica is removed. `excluding`:
        replicas not to be taken by this request, such as those that it failed at; session and prefix keep theirs.
        """
        first = prompt_token_ids[: self._prefix_length]
        prefix = struct.pack(f"<{len(first)}q", *first)
        decided_by, replica = self._decide(prefix, session_id, excluding)
        self._decisions[decided_by] += 1
        for strategy in self._strategies.values():
            strategy.settle(prefix, replica)
        if session_id is not None:
            self._sessions.settle(session_id, replica)
        return replica

    def set_load(self, replica: int, num_requests: int, num_kv_tokens: int) -> None:
        """Set a replica's load to a count made elsewhere; then call neither `began` nor `ended`."""
        for loads, load in ((self._requests, num_requests), (self._kv_tokens, num_kv_tokens)):
            if load != loads[replica]:  # else it stays the one of equals that changed longest ago
                loads.change(replica, load - loads[replica])

    def began(self, replica: int, num_kv_tokens: int) -> None:
        """Count a request that was sent: of n samples, those of the prompt and n times the tokens expected of each."""
        self._requests.change(replica, 1)
        self._kv_tokens.change(replica, num_kv_tokens)

    def ended(self, replica: int, num_kv_tokens: int) -> None:
        """Uncount a request that ended, failed or was moved to another replica; with the tokens given to `began`."""
        self._requests.change(replica, -1)
        self._kv_tokens.change(replica, -num_kv_tokens)

    @property
    def stats(self) -> BalancerStats:
        """A copy of the counts."""
        own = ("session", next(iter(self._strategies)))
        return BalancerStats(
            decisions=dict(self._decisions),
            num_fallbacks=sum(count for name, count in self._decisions.items() if name not in own),
            num_requests=self._requests.as_dict(),
            num_kv_tokens=self._kv_tokens.as_dict(),
        )

    def check_integrity(self) -> None:
        """Recount the loads and everything kept in addition to them."""
        self._requests.check_integrity()
        self._kv_tokens.check_integrity()
        serving = self._requests.serving()
        assert serving == self._kv_tokens.serving(), "the two loads differ in who serves"
        for replica, num_tokens in self._kv_tokens.as_dict().items():
            assert self._requests[replica] or not num_tokens, f"replica {replica} has KV tokens, but no requests"
        self._sessions.check_integrity()
        for strategy in self._strategies.values():
            strategy.check_integrity(serving)

    def _make(self, name: StrategyName, overload_threshold: float) -> Strategy:
        match name:
            case "prefix-aware":
                return PrefixAware(self._requests, overload_threshold)
            case "round-robin":
                return RoundRobin(self._requests, overload_threshold)
            case "requests":
                return LeastLoaded(self._requests)
            case "kv-cache":
                return LeastLoaded(self._kv_tokens)

    def _decide(self, prefix: bytes, session_id: str | None, excluding: Container[int]) -> tuple[str, int]:
        if session_id is not None:
            home = self._sessions.find(session_id)
            if home is not None and home not in excluding:
                return "session", home
        for name, strategy in self._strategies.items():
            replica = strategy.pick(prefix, excluding)
            if replica is not None:
                return name, replica
        replica = self._requests.least(excluding)
        if replica is None:
            excluded = f"all {len(self._requests)} that serve are excluded" if len(self._requests) else "none serves"
            raise LookupError(f"No replica is left for this request: {excluded}.")
        return "requests", replica


def _check_strategies(strategies: StrategyName | Sequence[StrategyName]) -> tuple[StrategyName, ...]:
    names = (strategies,) if isinstance(strategies, str) else strategies
    if not isinstance(names, list | tuple) or not names or len(set(names)) < len(names):
        raise ConfigError(refused("strategies", strategies, f"one or more of {', '.join(STRATEGIES)}, each once"))
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(unknown_name("load-balancing strategy", str(name), STRATEGIES))
    return tuple(names)
