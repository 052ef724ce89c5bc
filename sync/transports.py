"""The ends of each transport by its name."""

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

_ENDS: Mapping[str, tuple[Callable[..., WeightSender], Callable[..., WeightReceiver]]] = {
    "inproc": (InprocSender, InprocReceiver),
    "gloo": (GlooSender, GlooReceiver),
    "ipc": (IpcSender, IpcReceiver),
    "nccl": (NcclSender, NcclReceiver),
    "shm": (ShmSender, ShmReceiver),
    "store": (StoreSender, StoreReceiver),
}
TRANSPORTS = tuple(_ENDS)
"""The names of all transports."""
_End = TypeVar("_End")


def make_sender(name: str, **options: Any) -> WeightSender:
    """The trainer's end of transport `name`, one of `TRANSPORTS`; options are those of its class.

    Raises `SyncError` for a name or an option that does not exist.
    """
    return _make_end(_ends_of(name)[0], name, options)


def make_receiver(name: str, **options: Any) -> WeightReceiver:
    """The engine's end of transport `name`; "inproc" takes `sender=`, the other end. Raises as `make_sender` does."""
    return _make_end(_ends_of(name)[1], name, options)


def _ends_of(name: str) -> tuple[Callable[..., WeightSender], Callable[..., WeightReceiver]]:
    if name not in _ENDS:
        raise SyncError(f"Unknown weight transport '{name}'. Known: {', '.join(sorted(_ENDS))}.")
    return _ENDS[name]


def _make_end(end: Callable[..., _End], name: str, options: dict[str, Any]) -> _End:
    try:
        return end(**options)
    except TypeError as problem:
        raise SyncError(f"Options {sorted(options)} do not fit weight transport '{name}': {problem}.") from None
