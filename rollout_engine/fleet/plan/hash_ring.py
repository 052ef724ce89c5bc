"""Consistent hashing: the replicas of a key, in an order that hardly changes when a replica is added or removed."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator

from rollout_engine.base.seeds import mix

_POINTS = 16
"""Points of each replica: a replica that leaves hands its keys to about this number of others."""
_REPLICA_BITS = 32
_REPLICA_MASK = (1 << _REPLICA_BITS) - 1


class HashRing:
    """Replicas at fixed points of a ring of 64 bits; a key belongs to the first point after its hash.

    Points and hashes are the same in every process. Karger et al., "Consistent Hashing and Random Trees", 1997.
    """

    def __init__(self) -> None:
        self._points: list[int] = []
        """Position and replica in one number, ascending."""

    def add(self, replica: int) -> None:
        """Put a replica on the ring. Only keys that now belong to it move."""
        assert 0 <= replica <= _REPLICA_MASK, f"replica {replica} is not a number of {_REPLICA_BITS} bits"
        for point in _points_of(replica):
            insort(self._points, point)

    def remove(self, replica: int) -> None:
        """Take a replica off the ring. Only its own keys move."""
        for point in _points_of(replica):
            del self._points[bisect_left(self._points, point)]

    def walk(self, key: bytes) -> Iterator[int]:
        """Yield the replicas from the key's own on, once round the ring; each as often as it has points."""
        points = self._points
        position = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        start = bisect_left(points, position << _REPLICA_BITS)
        for index in range(start, start + len(points)):
            yield points[index % len(points)] & _REPLICA_MASK

    def check_integrity(self, replicas: set[int]) -> None:
        """Recompute the points of `replicas`, which are those on the ring."""
        points = sorted(point for replica in replicas for point in _points_of(replica))
        assert self._points == points, "the ring's points are not those of the replicas that serve"


def _points_of(replica: int) -> list[int]:
    return [mix(replica, index) << _REPLICA_BITS | replica for index in range(_POINTS)]
