"""The live weights of an engine, as journals note them."""

from typing import Protocol, TypeAlias

from rollout_engine.base.errors import LifecycleError

Seen: TypeAlias = tuple[int, int]
"""(version, number of updates so far)."""
NOTHING_SEEN: Seen = (-1, 0)


class LiveWeights(Protocol):
    """The weights of an engine."""

    @property
    def version(self) -> int:
        """The live version."""
        ...

    @property
    def num_updates(self) -> int:
        """Updates so far: the same version after one may have other weights."""
        ...

    def read_digest(self) -> str:
        """Their digest. Raises `LifecycleError` while they cannot be read."""
        ...


def read_change(weights: LiveWeights, seen: Seen) -> tuple[Seen, str] | None:
    """Return the live weights and their digest; None if they are those that were seen, or cannot be read now."""
    now = weights.version, weights.num_updates
    if now == seen:
        return None
    try:
        digest = weights.read_digest()
    except LifecycleError:  # asleep or in an update
        return None
    return (now, digest) if now == (weights.version, weights.num_updates) else None  # else the next call notes it
