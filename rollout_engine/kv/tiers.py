"""KV connectors by name, as `EngineConfig.kv_connector` has it."""

from rollout_engine.base.errors import ConfigError
from rollout_engine.kv.connector import KVConnector
from rollout_engine.kv.host import HostConnector

_NAMES = "'host', 'shm', 'disk:DIRECTORY' or 'package.module:Class'"


def make_connector(spec: str, max_bytes: int | None = None) -> KVConnector:
    """Make the connector of a name; `max_bytes`: bound of its bytes, None: its own choice. Raises `ConfigError`."""
    if spec == "host":
        return HostConnector("", max_bytes)
    raise ConfigError(f"kv_connector={spec!r} is not allowed: must be {_NAMES}.")
