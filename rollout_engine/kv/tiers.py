"""KV connectors by name, as `EngineConfig.kv_connector` has it."""

from collections.abc import Callable

from rollout_engine.base.errors import ConfigError, did_you_mean
from rollout_engine.kv.connector import KVConnector
from rollout_engine.kv.directory import DiskConnector, SharedMemoryConnector
from rollout_engine.kv.host import HostConnector
from rollout_engine.kv.user_connector import load_connector

CONNECTORS: dict[str, Callable[[str, int | None], KVConnector]] = {
    "host": HostConnector,
    "shm": SharedMemoryConnector,
    "disk": DiskConnector,
}
"""Connectors of the library, by the name before the first colon."""
_WITH_ARGUMENT = {"disk"}
_NAMES = (
    "'host' (memory of the engine's process), 'shm' (memory that the engines of this machine share), 'disk:DIRECTORY', "
    "or a class of yours as 'package.module:Class' or 'package.module:Class:ARGUMENT'"
)
_SIZE = "Its size in bytes is an option of its own: kv_connector_bytes=4 << 30 is 4 GiB."
_MEANT = {
    **dict.fromkeys(("cpu", "memory", "ram", "dram", "mem"), "host"),
    **dict.fromkeys(("shared", "shared_memory", "local"), "shm"),
    **dict.fromkeys(("file", "files", "ssd", "nvme", "directory"), "disk:DIRECTORY"),
}
"""Names that others give to such connectors."""


def make_connector(spec: str, max_bytes: int | None = None) -> KVConnector:
    """Make the connector of a name. `max_bytes`: bound of the bytes that it holds, at least 1; None: its own choice.

    Raises `ConfigError` for another name, or a class that cannot be made.
    """
    name, colon, argument = spec.partition(":")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"kv_connector_bytes={max_bytes} is not allowed: must be at least 1, or None.")
    if name in CONNECTORS and bool(colon) == (name in _WITH_ARGUMENT):
        return CONNECTORS[name](argument, max_bytes)
    names_class = argument.partition(":")[0].isidentifier() or name.lower() not in _MEANT
    if argument and name not in CONNECTORS and names_class:
        return load_connector(spec, max_bytes)
    meant = _MEANT.get(name.lower())
    hint = f"Did you mean '{meant}'?" if meant else did_you_mean(name, CONNECTORS.keys() - {name})
    hints = [hint, _SIZE if argument and name not in _WITH_ARGUMENT else ""]
    raise ConfigError(" ".join([f"kv_connector={spec!r} is not allowed: must be {_NAMES}.", *filter(None, hints)]))
