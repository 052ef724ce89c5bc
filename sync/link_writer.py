"""Writes the changes of a version against the one before it, which is read from the store, tensor by tensor."""

import os
import threading
from pathlib import Path

import msgspec
import xxhash
from torch import Tensor

from sync.changes import encode_all, encode_changes
from sync.digests import Digest, digest_of, tensor_bytes
from sync.errors import SyncError
from sync.lease import Lease
from sync.link import Link, TensorChanges, base_bytes, same_forms
from sync.manifest import TensorSpec, WeightManifest, torch_dtype
from sync.offer import Offer
from sync.own_files import open_file
from sync.pointer import CHANGES, LINK, MAX_LINKS
from sync.published import checked_manifest, lease_current, opened_tensor
from sync.shared_files import write_at
from sync.staging import READ_WRITE, write_file

_MOST_BYTES = 0.5
"""Share of a whole version's bytes in a chain's changes that makes the next version an anchor: a chain of more would
cost those that read all of it more than it saves."""


class DeltaBase:
    """The current version of a store, as the base of changes."""

    def __init__(self, lease: Lease, manifest: WeightManifest) -> None:
        self._lease, self._manifest = lease, manifest
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self.version, self.digest = manifest.version, lease.pointer.manifest_digest
        self._num_bytes = base_bytes(lease.links)

    @classmethod
    def find(cls, store: Path, offer: Offer) -> "DeltaBase | None":
        """The current version, if it can be read, and has the names, dtypes, shapes and ties of `offer`."""
        try:
            lease = lease_current(store)
            base = cls(lease, checked_manifest(lease))
        except SyncError:
            return None
        is_same = same_forms(offer.specs, base._specs) and base._manifest.aliases == offer.aliases
        return base if is_same and not lease.problem else None

    def takes_link(self, anchor_every: int) -> bool:
        """Whether the next version may be a link: the anchor is near, and the changes since then are few."""
        return len(self._lease.links) + 1 < min(anchor_every, MAX_LINKS + 1) and self.is_sparse

    @property
    def is_sparse(self) -> bool:
        """Whether the changes since the anchor are fewer bytes than it pays to keep."""
        return self._num_bytes <= _MOST_BYTES * self._manifest.num_bytes

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor."""
        return self._specs[name]

    def read(self, name: str) -> memoryview | None:
        """The bytes of a tensor; None if they are damaged."""
        spec = self._specs[name]
        memory = memoryview(bytearray(spec.num_bytes))
        try:
            with opened_tensor(self._lease, spec) as fetch:
                fetch(memory, 0)
        except SyncError:
            return None
        return memory


class LinkWriter:
    """Writes the files of one link into a directory. Several threads may `add` tensors."""

    def __init__(self, directory: Path, base: DeltaBase) -> None:
        self._directory, self._base = directory, base
        self._tensors: list[TensorChanges] = []
        self._checksum = xxhash.xxh3_128()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._file = open_file(directory / CHANGES, READ_WRITE)

    def add(self, name: str, tensor: Tensor, pieces: list[bytes]) -> None:
        """Write the changes of a contiguous tensor of the host, the pieces of which have these digests."""
        spec = self._base.spec(name)
        if digest_of(pieces) == spec.digest:
            return
        width, new = torch_dtype(spec.dtype).itemsize, tensor_bytes(tensor)
        old = self._base.read(name)
        is_sound = old is not None and _digest(old) == spec.digest
        encoded = encode_changes(old, new, width) if old is not None and is_sound else encode_all(new, width)
        lengths = tuple(map(len, encoded.streams))
        content = b"".join(encoded.streams)
        with self._lock:
            self._tensors.append(TensorChanges(name, encoded.num_changed, self._num_bytes, lengths))
            write_at(self._file, content, self._num_bytes)
            self._checksum.update(content)
            self._num_bytes += len(content)

    def finish(self, version: int, manifest_digest: str) -> bytes:
        """Write link.json, to the disk as the changes are; returns its bytes."""
        os.fsync(self._file)
        base = self._base
        link = Link(
            version,
            manifest_digest,
            base.version,
            base.digest,
            self._num_bytes,
            self._checksum.hexdigest(),
            tuple(sorted(self._tensors, key=lambda changes: changes.start)),
        )
        content = msgspec.json.encode(link)
        write_file(self._directory / LINK, content)
        return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _digest(memory: memoryview) -> str:
    digest = Digest()
    digest.update(memory)
    return digest.hexdigest()
