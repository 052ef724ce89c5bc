"""Decides which groups a collector may start, which ones make the next batch, and which have become too old.

A group is a prompt with its samples. It is *open* from its start until it is taken for a batch, and as old as its
oldest token; until it is complete, as old as the weights that were live when it started. A trainer is expected to make
one version of each batch:

    version        0         1         2         3          max_staleness = 2: tokens of version 0 may be in the
    batch          0         1         2         3          batches 0, 1 and 2, which hold 3 * groups_per_batch groups

So at version v at most (max_staleness + 1) * groups_per_batch groups are open, a batch's worth less for every batch
taken whose version is not live yet: started <= (max_staleness + version + 1) * groups_per_batch (Fu et al., 2025,
AReaL). That alone is not enough, because groups do not end in the order of their starts. So the oldest go first, and a
batch waits for a group that could not be in time for a later one.
"""

from collections.abc import Iterable


class StalenessControl:
    """The open groups of one collector, by their index. Plain Python: callers report versions and events."""

    def __init__(self, groups_per_batch: int, max_staleness: int | None, max_in_flight: int | None = None) -> None:
        """`max_staleness`: None for no bound. `max_in_flight`: groups that run at once; None: as many as may be open.

        Without either bound, `2 * groups_per_batch` run at once.
        """
        self.groups_per_batch, self._max_staleness = groups_per_batch, max_staleness
        unbounded = max_in_flight is None and max_staleness is None
        self._max_in_flight = 2 * groups_per_batch if unbounded else max_in_flight
        self.running: dict[int, int] = {}
        """Live version at the start of each group that is not complete."""
        self.complete: dict[int, int] = {}
        """Version of the oldest token of each complete group."""
        self._version = 0
        self._num_pending = 0
        """Batches taken whose versions are not live yet: after an update, the last one at most."""

    @property
    def num_pending(self) -> int:
        """Batches taken whose versions are not live yet."""
        return self._num_pending

    def restore(self, version: int, num_pending: int) -> None:
        """Note the live version and `num_pending` of an earlier process, as they were after its last batch."""
        self._version, self._num_pending = version, num_pending

    def observe(self, version: int) -> list[int]:
        """Note the live version. Returns the groups that are too old for any batch; the caller starts them again."""
        if version != self._version:
            self._num_pending = min(max(self._num_pending - abs(version - self._version), 0), 1)
            self._version = version
        if self._max_staleness is None:
            return []
        open_groups = [*self.running.items(), *self.complete.items()]
        too_old = [index for index, oldest in open_groups if version - oldest > self._max_staleness]
        self.forget(too_old)
        return too_old

    def num_to_start(self, *, waiting: bool) -> int:
        """Count the groups that may start now. `waiting`: the trainer waits for a batch; else it makes a version."""
        if self._max_staleness is None:
            num_open = (self._max_in_flight or 0) + self.groups_per_batch
        else:
            num_open = max(self._max_staleness + 1 - self._num_pending, int(waiting)) * self.groups_per_batch
        room = num_open - len(self.running) - len(self.complete)
        if self._max_in_flight is not None:
            room = min(room, self._max_in_flight - len(self.running))
        return max(room, 0)

    def note_start(self, index: int) -> None:
        """Note that a group has started under the live version."""
        self.running[index] = self._version

    def note_completion(self, index: int, oldest: int | None) -> None:
        """Note that a group is complete. `oldest`: version of its oldest token; None without any token."""
        started = self.running.pop(index)
        self.complete[index] = started if oldest is None else oldest

    def forget(self, indexes: Iterable[int]) -> None:
        """Drop open groups."""
        for index in indexes:
            self.running.pop(index, None)
            self.complete.pop(index, None)

    def take(self, *, is_last: bool) -> list[int]:
        """Take the groups of the next batch, oldest first; none while it is not ready.

        `is_last`: nothing else will start, so that the remaining groups make a smaller batch.
        """
        size = self.groups_per_batch
        if is_last and not self.running:
            size = min(size, len(self.complete))
        oldest_first = sorted(self.complete, key=lambda index: (self.complete[index], index))
        batch = oldest_first[:size]
        if len(batch) < size or not batch or self._should_wait(batch):
            return []
        self.forget(batch)
        self._num_pending += 1
        return batch

    def _should_wait(self, batch: list[int]) -> bool:
        """Whether a running group is older than one of `batch`, and without waiting the rest could be too late."""
        if self._max_staleness is None:
            return False
        newest = self.complete[batch[-1]]
        if not any(version < newest for version in self.running.values()):
            return False
        taken = set(batch)
        left = [*self.running.values(), *(version for index, version in self.complete.items() if index not in taken)]
        for place, oldest in enumerate(sorted(left)):
            batches_in_time = oldest + self._max_staleness - self._version - self._num_pending
            if place >= batches_in_time * self.groups_per_batch:
                return True
        return False
