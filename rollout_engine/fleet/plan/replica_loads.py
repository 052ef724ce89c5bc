"""Counts of the load that each replica has in flight, and the least loaded of those that serve."""

from collections.abc import Container
from heapq import heapify, heappop, heappush

_SMOOTHING = 8
"""Load added to the mean before others are compared with it, so that nothing is overloaded while the fleet is idle."""
_SPARE_ENTRIES = 64
"""Outdated heap entries allowed beyond one per serving replica."""


class ReplicaLoads:
    """Load in flight of each replica, in requests or in KV tokens; `in` and `len` are about those that serve.

    A replica's load outlives its serving: a draining replica ends its requests, and a dead one's requests are moved.

    heap    (load, tick, replica)...   least load first; of equal loads the one that changed longest ago
            live: the newest entry of each serving replica; the others are outdated and dropped when met
    """

    def __init__(self) -> None:
        self.total = 0
        """Sum over the replicas that serve."""
        self._loads: dict[int, int] = {}
        self._live: dict[int, tuple[int, int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._num_changes = 0

    def __contains__(self, replica: object) -> bool:
        return replica in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, replica: int) -> int:
        return self._loads.get(replica, 0)

    def serving(self) -> set[int]:
        """The replicas that serve."""
        return set(self._live)

    @property
    def mean(self) -> float:
        """Mean over the replicas that serve; 0.0 without any."""
        return self.total / max(len(self._live), 1)

    def as_dict(self) -> dict[int, int]:
        """Load of each replica that serves or has something in flight."""
        return dict(self._loads)

    def serve(self, replica: int) -> None:
        """Count a replica among those that serve."""
        assert replica not in self._live, f"replica {replica} serves already"
        load = self._loads.setdefault(replica, 0)
        self.total += load
        self._push(replica, load)

    def retire(self, replica: int) -> None:
        """Count a replica no longer among those that serve."""
        assert replica in self._live, f"replica {replica} does not serve"
        del self._live[replica]
        self.total -= self._loads[replica]
        if not self._loads[replica]:
            del self._loads[replica]
        self._trim()

    def change(self, replica: int, by: int) -> None:
        """Add to the load of a replica, whether it serves or not."""
        load = self._loads.get(replica, 0) + by
        assert load >= 0, f"replica {replica}: more has ended than began"
        self._loads[replica] = load
        if replica in self._live:
            self.total += by
            self._push(replica, load)
        elif not load:
            del self._loads[replica]

    def is_overloaded(self, replica: int, threshold: float) -> bool:
        """Whether `replica` has more than `threshold` x (mean + 8), in requests."""
        return self[replica] > threshold * (self.mean + _SMOOTHING)

    def least(self, excluding: Container[int]) -> int | None:
        """Find the serving replica with the least load, or None. O(log replicas) for each one excluded."""
        found, passed = None, []
        while self._heap and found is None:
            entry = self._heap[0]
            replica = entry[2]
            if self._live.get(replica) is not entry:
                heappop(self._heap)
            elif replica in excluding:
                passed.append(heappop(self._heap))
            else:
                found = replica
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def _push(self, replica: int, load: int) -> None:
        self._num_changes += 1
        self._live[replica] = entry = (load, self._num_changes, replica)
        heappush(self._heap, entry)
        self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _SPARE_ENTRIES:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def check_integrity(self) -> None:
        """Recount the total and assert that the heap has the present load of every serving replica."""
        assert all(load >= 0 for load in self._loads.values()), f"negative loads: {self._loads}"
        assert all(load or replica in self._live for replica, load in self._loads.items()), "idle replicas are kept"
        assert self.total == sum(self._loads[replica] for replica in self._live), "the total differs from its sum"
        live = sorted(entry for entry in self._heap if self._live.get(entry[2]) is entry)
        assert live == sorted(self._live.values()), "the heap lacks entries"
        for replica, (load, _, owner) in self._live.items():
            assert (owner, load) == (replica, self._loads[replica]), f"replica {replica}: an outdated entry is live"
        assert len(self._heap) <= 2 * len(self._live) + _SPARE_ENTRIES, "outdated entries pile up"
