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
    "'host', 'shm', 'disk:DIRECTORY', or a class of yours as 'package.module:Class' or 'package.module:Class:ARGUMENT'"
)


def make_connector(spec: str, max_bytes: int | None = None) -> KVConnector:
    """Make the connector of a name. `max_bytes`: bound of the bytes that it holds, at least 1; None: its own choice.

    Raises `ConfigError` for another name, or a class that cannot be made.
    """
    name, colon, argument = spec.partition(":")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"kv_connector_bytes={max_bytes} is not allowed: must be at least 1, or None.")
    if name in CONNECTORS and bool(colon) == (name in _WITH_ARGUMENT):
        return CONNECTORS[name](argument, max_bytes)
    if colon and name not in CONNECTORS and argument:
        return load_connector(spec, max_bytes)
    hint = did_you_mean(name, CONNECTORS) if name not in CONNECTORS else ""
    raise ConfigError(f"kv_connector={spec!r} is not allowed: must be {_NAMES}.{f' {hint}' if hint else ''}")
