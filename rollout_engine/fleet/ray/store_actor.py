"""The Ray actor that keeps a copy of published weights on its node, for all replicas there.

    driver   NodeStores.near ── StoreOrder, references to arrays of bytes ──> actor   StoreActor.copy
                             <── StorePlace | Failure ───────────────────
                                 the arrays: through Ray's object store, one publication cut into pieces

The copy is a published store (`sync.store`) in the node's shared memory. Its manifest has to be the original's, and the
digests in it are computed from the bytes written: so a damaged copy is an error.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from rollout_engine.base.errors import ChecksumError, as_weight_errors
from rollout_engine.children.failure import failure_of
from rollout_engine.cluster.ray_cluster import import_ray
from rollout_engine.fleet.ray.actor import Order, read_order
from rollout_engine.fleet.run.store_directory import StoreDirectory
from sync.base import WeightSender
from sync.lazy_tensor import Fetch, FileTensor
from sync.manifest import WeightManifest, torch_dtype
from sync.transports import make_sender

_NUM_THREADS = 4
"""Threads that fetch pieces and write them."""


class StoreOrder(Order, frozen=True, kw_only=True, tag="store", forbid_unknown_fields=True):
    """Order to an actor: the publication that it is to copy."""

    manifest: WeightManifest
    piece_bytes: int
    """Bytes of each piece but the last. They are cut from the bytes of all tensors in a row."""


class StorePlace(msgspec.Struct, frozen=True, tag="stored", forbid_unknown_fields=True):
    """The place of a copy that can be read."""

    directory: str


class StoreActor:
    """The actor of one node: it holds a store in shared memory until it ends."""

    def __init__(self) -> None:
        self._directory: StoreDirectory | None = None
        self._sender: WeightSender | None = None

    def copy(self, order: bytes, pieces: Sequence[Any]) -> bytes:
        """Publish a copy in place of the last one. An error is returned as a `Failure`."""
        try:
            read = read_order(order, StoreOrder)
            with as_weight_errors():
                return msgspec.msgpack.encode(StorePlace(self._copy(read.manifest, pieces, read.piece_bytes)))
        except Exception as error:
            return msgspec.msgpack.encode(failure_of(error))

    def end(self) -> bytes:
        """Remove the copy."""
        if self._sender is not None and self._directory is not None:
            self._sender.close()
            self._directory.remove()
            self._sender = self._directory = None
        return b""

    def _copy(self, manifest: WeightManifest, pieces: Sequence[Any], piece_bytes: int) -> str:
        if self._directory is None or self._sender is None:
            self._directory = StoreDirectory()
            options = dict(directory=self._directory.path, reset_version=True, num_threads=_NUM_THREADS)
            self._sender = make_sender("store", **options)
        copied = self._sender.offer(_tensors(manifest, pieces, piece_bytes), manifest.version, {})
        if copied != manifest:
            what = f"The copy of version {manifest.version} has digest {copied.digest}, the original {manifest.digest}"
            raise ChecksumError(f"{what}: it was damaged on its way. Update again.")
        return str(self._directory.path)


def _tensors(manifest: WeightManifest, pieces: Sequence[Any], piece_bytes: int) -> list[tuple[str, FileTensor]]:
    """The names and tensors of a publication, also tied names; each tensor is fetched when it is asked for."""
    starts = accumulate((spec.num_bytes for spec in manifest.tensors), initial=0)
    tensors = {
        spec.name: FileTensor(spec.shape, torch_dtype(spec.dtype), _fetch_from(pieces, piece_bytes, start))
        for spec, start in zip(manifest.tensors, starts, strict=False)
    }
    tied = [(name, tensors[first]) for first, *others in manifest.aliases for name in others]
    return [*tensors.items(), *tied]


def _fetch_from(pieces: Sequence[Any], piece_bytes: int, first: int) -> Fetch:
    """The function that fetches bytes of the tensor that begins at byte `first` of all pieces."""
    ray = import_ray()

    def fetch(out: memoryview, start: int) -> None:
        start += first
        while out:
            number, skipped = divmod(start, piece_bytes)
            part = memoryview(ray.get(pieces[number]))[skipped : skipped + len(out)]
            out[: len(part)] = part
            out, start = out[len(part) :], start + len(part)

    return fetch
