"""The two ends of each weight transport between a client and a core on one machine: how they find each other.

They meet in a directory of the pair's own, mode 0700, through which bytes travel, or for "ipc" handles of the device's
memory: in shared memory where there is room, else inside the core's directory. The core derives its name, so that it
can remove what a killed client leaves.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollout_engine.errors import WeightUpdateError, unknown_name
from rollout_engine.execution.arrivals import copy_by_kernel
from rollout_engine.frontend.lifeline import SHARED_MEMORY, lock_directory
from sync.base import Metadata, WeightReceiver, WeightSender
from sync.manifest import TensorSpec
from sync.transports import TRANSPORTS, make_receiver, make_sender

DEFAULT = "shm" if hasattr(os, "memfd_create") else "store"  # shared memory is sealed, as on Linux
_REMOTE = ("shm", "store", "gloo", "ipc")


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a sender awaits the core's receiver."""

    transport: str
    directory: str
    timeout: float
    number: int = 0
    """Of the group, where the transport forms one: each needs a new rendezvous."""

    def make_sender(self) -> WeightSender:
        """The client's end."""
        copy_by_kernel()
        return make_sender(self.transport, **self._options(sending=True))

    def make_receiver(self) -> WeightReceiver:
        """The core's end."""
        check_remote(self.transport)
        return make_receiver(self.transport, **self._options(sending=False))

    def _options(self, *, sending: bool) -> Mapping[str, Any]:
        if self.transport == "ipc":
            return {"directory": self.directory, "timeout": self.timeout}
        if self.transport != "gloo":
            return {"directory": self.directory, "num_threads": torch.get_num_threads()}
        group = {"rendezvous": f"file://{self.directory}/group-{self.number}", "world_size": 2, "timeout": self.timeout}
        return group if sending else group | {"rank": 1}


def check_remote(transport: str) -> None:
    """Raise `WeightUpdateError` unless weights reach a core in another process that way."""
    if transport not in TRANSPORTS:
        raise WeightUpdateError(unknown_name("weight transport", transport[:80], TRANSPORTS))
    if transport not in _REMOTE:
        names = ", ".join(map(repr, _REMOTE))
        raise WeightUpdateError(f"transport='{transport}' does not reach an engine in another process: use {names}.")


def make_directory(core_directory: str, client_index: int, metadata: Metadata) -> tuple[str, int]:
    """A directory with room for the weights that `metadata` describes, and the descriptor that marks it as in use."""
    num_bytes = sum(TensorSpec(name, shape, dtype, "").num_bytes for name, (dtype, shape) in metadata.items())
    roomy = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > num_bytes
    path = Path(SHARED_MEMORY if roomy else core_directory) / _name(core_directory, client_index)
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path), lock_directory(path)


def remove_directories(core_directory: str, client_index: int | None = None) -> None:
    """Of one client, or of all."""
    pattern = _name(core_directory, "*" if client_index is None else client_index)
    for parent in (SHARED_MEMORY, core_directory):
        for path in Path(parent).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _name(core_directory: str, client_index: int | str) -> str:
    return f"{Path(core_directory).name}-weights-{client_index}"
