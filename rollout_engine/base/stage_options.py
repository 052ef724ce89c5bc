"""Checks of options that stages of a pipe do not take (`EngineConfig.pipeline_parallel_size`)."""

from typing import TYPE_CHECKING

from rollout_engine.base.errors import ConfigError

if TYPE_CHECKING:
    from rollout_engine.base.config import EngineConfig


def check_stages(config: "EngineConfig") -> None:
    """Raise `ConfigError` if another option is set that an engine of several stages does not have."""
    size = config.pipeline_parallel_size
    if size == 1:
        return
    found = {
        'device="cuda"': (config.device == "cuda", "stages run on CPUs, and devices are cut by tensor_parallel_size"),
        'executor="ray"': (config.executor == "ray", "stages are processes of one machine"),
        "deterministic=False": (config.deterministic is False, "stages have the bits of one process"),
        "async_scheduling=True": (config.async_scheduling is True, "as many steps are in flight as there are stages"),
        "speculation": (config.speculates is not None, "a step behind drafts waits for them, which empties the pipe"),
        "quantization": (config.quantization is not None, "stages have the bits of one engine that is not rounded"),
    }
    for other, (is_set, reason) in found.items():
        if is_set:
            what, advice = f"pipeline_parallel_size={size} and {other} are both set", other.partition("=")[0]
            raise ConfigError(f"{what}: {reason}. Leave {advice} out.")
