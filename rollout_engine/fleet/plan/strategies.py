"""The balancer's strategies: each picks one serving replica for a request, or passes."""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Container
from itertools import islice

from rollout_engine.fleet.plan.hash_ring import HashRing
from rollout_engine.fleet.plan.replica_loads import ReplicaLoads

_MAX_PROBES = 16
"""Replicas looked at to place a new prefix."""
_MAX_HOMES = 1 << 16
"""Keys whose replica is remembered: those used last."""


class Strategy:
    """One way to pick a replica. It is notified of every replica that is added or removed, and of every decision."""

    def add(self, replica: int) -> None:
        """Let `replica` serve."""

    def remove(self, replica: int) -> None:
        """Pick `replica` no longer."""

    def pick(self, prefix: bytes, excluding: Container[int]) -> int | None:
        """Pick a serving replica that is not excluded; None to pass."""
        raise AssertionError("every strategy defines `pick`")

    def settle(self, prefix: bytes, replica: int) -> None:
        """Note the replica of a request with this prefix, whether this strategy chose it or not."""

    def check_integrity(self, serving: set[int]) -> None:
        """Assert that the strategy has exactly the replicas that serve."""


class LeastLoaded(Strategy):
    """The replica with the least load, of equal ones the one whose load changed longest ago."""

    def __init__(self, loads: ReplicaLoads) -> None:
        self._loads = loads

    def pick(self, prefix: bytes, excluding: Container[int]) -> int | None:
        """Pick the least loaded; it passes only if all are excluded."""
        return self._loads.least(excluding)


class RoundRobin(Strategy):
    """Each replica in turn, by number. It passes, and the turn with it, when the next one is overloaded."""

    def __init__(self, requests: ReplicaLoads, overload_threshold: float) -> None:
        self._requests, self._overload_threshold = requests, overload_threshold
        self._replicas: list[int] = []
        self._last = -1

    def add(self, replica: int) -> None:
        """Give `replica` a turn, at its number."""
        insort(self._replicas, replica)

    def remove(self, replica: int) -> None:
        """Give `replica` no more turns."""
        self._replicas.remove(replica)

    def pick(self, prefix: bytes, excluding: Container[int]) -> int | None:
        """Pick the next one that is not excluded."""
        start = bisect_right(self._replicas, self._last)
        for index in range(start, start + len(self._replicas)):
            replica = self._replicas[index % len(self._replicas)]
            if replica not in excluding:
                self._last = replica
                return None if self._requests.is_overloaded(replica, self._overload_threshold) else replica
        return None

    def check_integrity(self, serving: set[int]) -> None:
        """Assert that each replica that serves has one turn."""
        assert self._replicas == sorted(serving), "turns are not those of the replicas that serve"


class PrefixAware(Strategy):
    """The home of the prefix: the replica of its first request. It passes if that replica is overloaded.

    A new prefix is placed by consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): the
    first replica on the ring that has no more requests than the mean. So homes are even before anything is overloaded,
    and front ends that share idle replicas agree on them.
    """

    def __init__(self, requests: ReplicaLoads, overload_threshold: float) -> None:
        self._requests, self._overload_threshold = requests, overload_threshold
        self._ring, self._homes = HashRing(), Homes(requests)

    def add(self, replica: int) -> None:
        """Place new prefixes on `replica` too; known ones keep their replicas."""
        self._ring.add(replica)

    def remove(self, replica: int) -> None:
        """Place the prefixes of `replica` anew when they are next asked for."""
        self._ring.remove(replica)

    def pick(self, prefix: bytes, excluding: Container[int]) -> int | None:
        """Pick the home, or a place for a prefix that has none; it passes without a prompt."""
        replica = self._homes.find(prefix)
        if replica is None or replica in excluding:
            replica = self._place(prefix, excluding) if prefix else None
        if replica is None or self._requests.is_overloaded(replica, self._overload_threshold):
            return None
        return replica

    def settle(self, prefix: bytes, replica: int) -> None:
        """Make `replica` the home of a prefix that has none."""
        if prefix:
            self._homes.settle(prefix, replica)

    def check_integrity(self, serving: set[int]) -> None:
        """Assert that the ring has the replicas that serve, and that memory is bounded."""
        self._ring.check_integrity(serving)
        self._homes.check_integrity()

    def _place(self, prefix: bytes, excluding: Container[int]) -> int | None:
        candidates = (replica for replica in self._ring.walk(prefix) if replica not in excluding)
        mean, least = self._requests.mean, None
        for replica in islice(candidates, _MAX_PROBES):
            if self._requests[replica] <= mean:
                return replica
            if least is None or self._requests[replica] < self._requests[least]:
                least = replica
        return least


class Homes:
    """The replica of the first request of each key, as long as it serves. Forgets the keys used longest ago."""

    def __init__(self, serving: Container[int]) -> None:
        self._serving = serving
        self._replica_of: OrderedDict[str | bytes, int] = OrderedDict()

    def find(self, key: str | bytes) -> int | None:
        """Return the key's home if it serves."""
        replica = self._replica_of.get(key)
        if replica is None or replica not in self._serving:
            return None
        self._replica_of.move_to_end(key)
        return replica

    def settle(self, key: str | bytes, replica: int) -> None:
        """Make `replica` the home of a key that has none which serves."""
        if self.find(key) is None:
            self._replica_of[key] = replica
            self._replica_of.move_to_end(key)
            if len(self._replica_of) > _MAX_HOMES:
                self._replica_of.popitem(last=False)

    def check_integrity(self) -> None:
        """Assert that memory is bounded."""
        assert len(self._replica_of) <= _MAX_HOMES, f"{len(self._replica_of)} homes are remembered"
