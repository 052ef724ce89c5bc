"""The transports by name."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sync.base import WeightReceiver, WeightSender
from sync.errors import SyncError
from sync.gloo import GlooReceiver, GlooSender
from sync.inproc import InprocReceiver, InprocSender
from sync.ipc import IpcReceiver, IpcSender
from sync.nccl import NcclReceiver, NcclSender
from sync.shm import ShmReceiver, ShmSender
from sync.store import StoreReceiver, StoreSender

_End = TypeVar("_End")
_SENDERS: Mapping[str, Callable[..., WeightSender]] = {
    "inproc": InprocSender,
    "gloo": GlooSender,
    "ipc": IpcSender,
    "nccl": NcclSender,
    "shm": ShmSender,
    "store": StoreSender,
}
_RECEIVERS: Mapping[str, Callable[..., WeightReceiver]] = {
    "inproc": InprocReceiver,
    "gloo": GlooReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "shm": ShmReceiver,
    "store": StoreReceiver,
}
TRANSPORTS = tuple(_SENDERS)
"""Every name that exists."""


def make_sender(name: str, **options: Any) -> WeightSender:
    """The trainer's end of transport `name`, one of `TRANSPORTS`; options are those of its class.

    Raises `SyncError` for a name or an option that does not exist.
    """
    return _make(_SENDERS, name, options)


def make_receiver(name: str, **options: Any) -> WeightReceiver:
    """The engine's end of transport `name`; "inproc" takes `sender=`, the other end. Raises as `make_sender`."""
    return _make(_RECEIVERS, name, options)


def _make(ends: Mapping[str, Callable[..., _End]], name: str, options: dict[str, Any]) -> _End:
    if name not in ends:
        raise SyncError(f"Unknown weight transport '{name}'. Known: {', '.join(sorted(ends))}.")
    try:
        return ends[name](**options)
    except TypeError as problem:
        raise SyncError(f"Options {sorted(options)} do not fit weight transport '{name}': {problem}.") from None
