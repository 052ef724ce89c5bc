"""Options that `data_parallel_size` does not go with."""

from typing import Any

from rollout_engine.base.errors import ConfigError


def check_data_parallel(config: Any) -> None:
    """Raise `ConfigError` for an option that engines which divide experts do not serve. `config`: an `EngineConfig`."""
    size = config.data_parallel_size
    if size == 1:
        return
    ranks, stages = config.tensor_parallel_size, getattr(config, "pipeline_parallel_size", 1)
    found = {
        'device="cuda"': (config.device == "cuda", "experts are divided over engines on CPUs"),
        "deterministic=False": (config.deterministic is False, "divided experts have the bits of one engine"),
        f"tensor_parallel_size={ranks}": (ranks > 1, "an engine that divides experts with others is one process"),
        f"pipeline_parallel_size={stages}": (stages > 1, "an engine that divides experts with others is one process"),
        f"quantization={config.quantization!r}": (config.quantization is not None, "divided experts are not rounded"),
        f"speculation={config.speculation!r}": (
            config.speculation != "off",
            "engines that step together draft nothing",
        ),
        "async_scheduling=True": (config.async_scheduling is True, "engines that step together schedule no step ahead"),
        f"kv_connector={config.kv_connector!r}": (
            config.kv_connector is not None,
            "its tiers tell weights apart by a digest of all of them, and such an engine has some",
        ),
        f"load_format={config.load_format!r}": (
            config.load_format == "sharded",
            "no sharded state has parts of such engines",
        ),
    }
    for other, (is_set, reason) in found.items():
        if is_set:
            raise ConfigError(f"data_parallel_size={size} and {other} are both set: {reason}. Give one of them.")
