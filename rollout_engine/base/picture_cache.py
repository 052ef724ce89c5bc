"""Pictures that cross to another process once: both ends of a mirrored cache in one file.

    SentPictures.strip      pictures of a request ──> digests, and the pictures that the other end lacks
    ReceivedPictures        add: these, in the same order;  restore: digests ──> pictures

Both ends change the same cache in the same way, in the order of the messages between them, so the sender need not ask
which pictures the receiver holds. A bound of 0 bytes keeps nothing. Not thread-safe.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from rollout_engine.base.metrics import PictureStats
from rollout_engine.base.pictures import Picture, PlacedPicture

Held = TypeVar("Held")

ENTRY_BYTES = 512
"""Counted for each picture that is held, in addition to its arrays: they may be empty."""


class PictureCache(Generic[Held]):
    """Values by the digests of pictures: those used last, as many as `max_bytes` of pictures allow."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, tuple[int, Held]] = OrderedDict()
        self.num_bytes = 0
        """Bytes of the pictures whose values are held, `ENTRY_BYTES` of each included."""

    def __len__(self) -> int:
        return len(self._held)

    def digests(self) -> list[bytes]:
        """Digests of the pictures, the one used last at the end."""
        return list(self._held)

    def use(self, digest: bytes) -> Held | None:
        """The value of a picture, which counts as used now; None if it is not held."""
        found = self._held.get(digest)
        if found is None:
            return None
        self._held.move_to_end(digest)
        return found[1]

    def add(self, digest: bytes, num_bytes: int, value: Held) -> None:
        """Hold the value of a picture that is not held; others are dropped for it, and one above the bound is not."""
        num_bytes += ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        self._held[digest] = num_bytes, value
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (dropped, _) = self._held.popitem(last=False)
            self.num_bytes -= dropped

    def clear(self) -> None:
        """Drop all values."""
        self._held.clear()
        self.num_bytes = 0


class SentPictures:
    """The sender's end: digests and sizes of the pictures that the other end holds, without their arrays."""

    def __init__(self, max_bytes: int) -> None:
        self.cache: PictureCache[bool] = PictureCache(max_bytes)

    def strip(self, placed: Sequence[PlacedPicture]) -> tuple[list[PlacedPicture], list[Picture]]:
        """The same places of pictures without arrays, and the pictures to send before them, in order."""
        missing = []
        for picture in (each.picture for each in placed):
            if not self.cache.use(picture.digest):
                missing.append(picture)
                self.cache.add(picture.digest, picture.num_bytes, True)
        return without_arrays(placed), missing


class ReceivedPictures:
    """The receiver's end: the pictures themselves."""

    def __init__(self, max_bytes: int, stats: PictureStats | None = None) -> None:
        """`stats`: kept up to date."""
        self.cache: PictureCache[Picture] = PictureCache(max_bytes)
        self._stats = stats or PictureStats()
        self.arrived: deque[Picture] = deque()
        """Pictures that arrived for messages that have not, in order."""
        self.num_arrived_bytes = 0
        """Bytes of these."""

    def add(self, picture: Picture) -> None:
        """Take a picture that has arrived; the next message that is restored refers to it."""
        self.arrived.append(picture)
        self.num_arrived_bytes += picture.num_bytes
        self._stats.num_received += 1
        self._stats.num_received_bytes += picture.num_bytes

    def restore(self, placed: Iterable[PlacedPicture]) -> list[PlacedPicture]:
        """The places that `SentPictures.strip` was given. Raises `LookupError` for a picture that has not arrived."""
        return [PlacedPicture(each.start, each.end, self._take(each.picture.digest)) for each in placed]

    def clear(self) -> None:
        """Drop all pictures, those of messages that have not arrived as well."""
        self.cache.clear()
        self.arrived.clear()
        self.num_arrived_bytes = 0

    def _take(self, digest: bytes) -> Picture:
        if (found := self.cache.use(digest)) is not None:
            self._stats.num_hits += 1
            return found
        if not self.arrived or self.arrived[0].digest != digest:
            raise LookupError(f"a picture of digest {digest.hex()} has not arrived")
        picture = self.arrived.popleft()
        self.num_arrived_bytes -= picture.num_bytes
        self.cache.add(digest, picture.num_bytes, picture)
        return picture


def without_arrays(placed: Iterable[PlacedPicture]) -> list[PlacedPicture]:
    """The same places, of pictures that are their digests alone."""
    return [PlacedPicture(each.start, each.end, Picture(each.picture.digest, {})) for each in placed]
