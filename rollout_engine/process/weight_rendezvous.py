"""Connects the sender of a client with the receiver of a core on the same machine, for each weight transport.

Each client has a directory for it, mode 0700: in shared memory if the weights fit, else inside the core's directory.
Its name begins with the core's and the client's, so that the core can remove a killed client's directory, and ends at
random: in a directory open to all users, no other one can take it first.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollout_engine.base.errors import WeightUpdateError, unknown_name
from rollout_engine.process.tcp_address import is_tcp
from rollout_engine.weights.copy_kernels import kernel_writer
from sync.base import Metadata, WeightReceiver, WeightSender
from sync.locked_directories import SHARED_MEMORY, lock_directory
from sync.manifest import TensorSpec
from sync.shared_files import check_private
from sync.transports import TRANSPORTS, make_receiver, make_sender

DEFAULT = "shm" if hasattr(os, "memfd_create") else "store"  # shared memory is sealed, as on Linux
_REMOTE = ("shm", "store", "gloo", "ipc")


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes the place at which the core's receiver meets the client's sender."""

    transport: str
    directory: str
    timeout: float
    number: int = 0
    """Number of the process group, for transports that form one."""

    def make_sender(self) -> WeightSender:
        """Make the client's end."""
        writer = {"writer": kernel_writer()} if self.transport == "shm" else {}
        return make_sender(self.transport, **self._options(sending=True), **writer)

    def make_receiver(self) -> WeightReceiver:
        """Make the core's end. Raises `WeightUpdateError` for a transport that does not reach another process."""
        check_remote(self.transport)
        try:
            check_private(Path(self.directory))
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else problem
            raise WeightUpdateError(f"Weights cannot be received in {self.directory[:200]!r}: {why}.") from None
        return make_receiver(self.transport, **self._options(sending=False))

    def _options(self, *, sending: bool) -> Mapping[str, Any]:
        if self.transport == "ipc":
            return {"directory": self.directory, "timeout": self.timeout}
        if self.transport != "gloo":
            return {"directory": self.directory, "num_threads": torch.get_num_threads()}
        group = {"rendezvous": f"file://{self.directory}/group-{self.number}", "world_size": 2, "timeout": self.timeout}
        return group if sending else group | {"rank": 1}


def check_remote(transport: str) -> None:
    """Raise `WeightUpdateError` unless the transport reaches a core in another process."""
    if transport not in TRANSPORTS:
        raise WeightUpdateError(unknown_name("weight transport", transport[:80], TRANSPORTS))
    if transport not in _REMOTE:
        names = ", ".join(map(repr, _REMOTE))
        raise WeightUpdateError(f"transport='{transport}' does not reach an engine in another process: use {names}.")


def check_near(transport: str, core: str) -> None:
    """Raise `WeightUpdateError` for a client over TCP: the two ends of a transport meet in a directory."""
    if is_tcp(core):
        paths = "publish the weights where the engine's machine can read them and give that path"
        groups = "form a gloo or nccl group by `init_weight_update_group` of WeightSyncExtension"
        near = "where the engine runs on this machine, connect by its directory"
        what = f"update_weights: transport='{transport}' needs a directory of both ends, and {core} is reached over TCP"
        raise WeightUpdateError(f"{what}: {paths}; {groups}; or, {near}.")


def make_directory(core_directory: str, client_index: int, metadata: Metadata) -> tuple[str, int]:
    """Make a client's directory. Returns its path and the descriptor that marks it as in use.

    `metadata` describes the weights: the directory is in shared memory if they fit there.
    """
    num_bytes = sum(TensorSpec(name, shape, dtype, "").num_bytes for name, (dtype, shape) in metadata.items())
    roomy = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > num_bytes
    prefix = f"{_name(core_directory, client_index)}-"
    path = tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY if roomy else core_directory)
    return path, lock_directory(path)


def remove_directories(core_directory: str, client_index: int | None = None) -> None:
    """Remove the directory of one client, or of all clients."""
    pattern = _name(core_directory, "*" if client_index is None else client_index) + "-*"
    for parent in (SHARED_MEMORY, core_directory):
        for path in Path(parent).glob(pattern):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)


def _name(core_directory: str, client_index: int | str) -> str:
    return f"{Path(core_directory).name}-weights-{client_index}"
