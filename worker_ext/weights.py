"""A weight update as separate RPC calls, for trainers that drive the transport themselves.

    begin_weight_update(manifest) ──> receive_weights(...) ──> verify_weights() ──> commit_weight_update(version)
                                      or update_weight(...)        abort_weight_update() at any point before

Until the commit the old weights serve on, and steps continue. An update that was begun stays open until its commit or
abort, whichever client calls that, or until its timeout or until the client that began it is gone; meanwhile no other
can begin. The engine's `update_weights` does all of this in one call.
"""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sync.base import WeightReceiver
from sync.errors import ManifestMismatch, SyncError
from sync.manifest import WeightManifest
from sync.published import checked_manifest, lease_current
from sync.transports import make_receiver
from worker_ext.base import WorkerExtension, WorkerLike, rpc, rpc_beside_steps


class WeightSyncExtension(WorkerExtension):
    """Receives weights by any transport of `sync`, in one transaction of the worker (`worker.update`)."""

    def __init__(self, worker: WorkerLike) -> None:
        super().__init__(worker)
        self._group: WeightReceiver | None = None

    @rpc
    def get_model_metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of everything that an update may send."""
        return self.worker.update.metadata()

    @rpc
    def get_weight_digest(self) -> str:
        """Total digest of the live weights under the module's own names."""
        return self.worker.update.digest()

    @rpc
    def init_weight_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout: float = 300.0,
    ) -> None:
        """Join the trainer, rank 0 at tcp://master_address:master_port, as rank `rank_offset` + the worker's own.

        Returns at once: the group forms in the background. A former group is left.
        """
        rank, rendezvous = rank_offset + self.worker.rank, f"tcp://{master_address}:{master_port}"
        group = make_receiver(backend, rendezvous=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
        self.close()
        self._group = group

    @rpc
    def check_nccl_group_ready(self) -> bool:
        """Whether all ranks of the group (gloo's too) have joined. Raises once it is clear that they will not."""
        group: Any = self._join_group()
        return bool(group.ready())

    @rpc_beside_steps
    def begin_weight_update(
        self, manifest: WeightManifest, reset_version: bool = False, timeout: float = 300.0, partial: bool = False
    ) -> bool:
        """Open an update. False: these very weights are live under this version already, and nothing is open.

        `timeout`: seconds to its commit; after that it is aborted, and the next call raises. `partial`: the manifest
        may leave weights out, which keep their values.
        """
        return self.worker.update.begin(manifest, reset_version=reset_version, timeout=timeout, partial=partial)

    @rpc_beside_steps
    def receive_weights(
        self,
        transport: Literal["store", "shm", "gloo", "nccl", "ipc"] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Stage all tensors of the open update, while the trainer sends them.

        `transport`, with `options` of its receiver (`sync.make_receiver`); None: the group of
        `init_weight_update_group`.
        """
        self.worker.update.manifest("receive_weights")
        if transport is None:
            self.worker.update.receive(self._join_group())
            return
        receiver = make_receiver(transport, **options or {})
        try:
            self.worker.update.receive(receiver)
        finally:
            receiver.close()

    @rpc_beside_steps
    def update_weight(self, name: str, dtype_name: str, shape: tuple[int, ...], tensor: Tensor | None = None) -> None:
        """Stage one tensor of the open update: `tensor`, or, if None, the one that the trainer broadcasts to the group.

        The trainer broadcasts a version of this tensor alone.
        """
        manifest = self.worker.update.manifest("update_weight")
        spec = next((spec for spec in manifest.tensors if spec.name == name), None)
        if spec is None:
            raise ManifestMismatch(f"'{name}' is not in the manifest of the open update.")
        if (spec.dtype, spec.shape) != (dtype_name, shape):
            came, wanted = (dtype_name, shape), (spec.dtype, spec.shape)
            raise ManifestMismatch(f"'{name}' is announced as {came}; the manifest says {wanted}.")
        if tensor is not None:
            self.worker.update.stage([(name, tensor)])
        else:
            self.worker.update.receive(self._join_group(), WeightManifest.of(manifest.version, [spec]))

    @rpc_beside_steps
    def verify_weights(self) -> str:
        """Total digest of the staged tensors. Raises unless all have arrived, unchanged and finite."""
        return self.worker.update.verify()

    @rpc_beside_steps
    def commit_weight_update(self, version: int, kv: Literal["keep", "recompute"] = "keep") -> str:
        """Make the verified weights live, between two steps. Returns the digest of the live weights."""
        return self.worker.update.commit(version, kv)

    @rpc_beside_steps
    def abort_weight_update(self) -> None:
        """Drop the open update. No-op without one."""
        self.worker.update.abort()

    @rpc_beside_steps
    def load_weights_from_storage(
        self, storage_path: str, num_threads: int = 1, reset_version: bool = False, partial: bool = False
    ) -> str:
        """Stage, verify and commit the current version of a published store; returns the digest of the live weights.

        A directory that is not a store of `sync.publish` is refused: nothing proves that its bytes are complete.
        """
        update = self.worker.update
        manifest = checked_manifest(lease_current(Path(storage_path)))
        if not update.begin(manifest, reset_version=reset_version, partial=partial):
            return update.digest() if partial else manifest.digest
        try:
            self.receive_weights("store", {"directory": storage_path, "num_threads": num_threads})
            update.verify()
            return update.commit(manifest.version, "keep")
        except BaseException:
            update.abort()
            raise

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _join_group(self) -> WeightReceiver:
        if self._group is None:
            raise SyncError("There is no weight group: call init_weight_update_group first, or name a transport.")
        return self._group
