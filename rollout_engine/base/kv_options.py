"""Options that do not go with a KV connector."""

from typing import Any

from rollout_engine.base.errors import ConfigError


def check_kv_connector(config: Any) -> None:
    """Raise `ConfigError` if options of an `EngineConfig` do not go with its `kv_connector`."""
    if config.kv_connector is None:
        if config.kv_connector_bytes is not None:
            raise ConfigError(
                f"kv_connector_bytes={config.kv_connector_bytes} is the size of a kv_connector, and there is none. "
                "Give one, or leave kv_connector_bytes out."
            )
        return
    found = {"enable_prefix_caching=False": (not config.enable_prefix_caching, "nothing is looked up")}
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        size = getattr(config, name)
        found[f"{name}={size}"] = (size > 1, "KV of stages, and of engines that divide experts, is not saved or loaded")
    is_far = config.tensor_parallel_size > 1 and (config.device == "cuda" or config.executor == "ray")
    found["tensor_parallel_size"] = (is_far, "KV of ranks is saved and loaded on CPUs of one machine alone")
    for other, (is_set, reason) in found.items():
        if is_set:
            mine = f"kv_connector={config.kv_connector!r}"
            raise ConfigError(f"{mine} and {other} are both set: {reason}. Give one of them.")
