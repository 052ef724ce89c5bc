"""Options that a model which is cut, or divided among stages or engines, does not go with."""

from typing import Any

from rollout_engine.base.errors import ConfigError


def check_ranks(config: Any) -> None:
    """Raise `ConfigError` if options of an `EngineConfig` do not go with its number of ranks."""
    size, num_ranks = config.tensor_parallel_size, config.num_ranks
    if config.executor != "auto" and (num_ranks > 1) == (config.executor == "inline"):
        cut = f"tensor_parallel_size={size}" if size == num_ranks else "pipeline_parallel_size"
        what, instead = f"executor={config.executor!r} and {cut}", "Leave executor out"
        if num_ranks > 1:
            raise ConfigError(f"{what} are both set: one process has one rank. {instead}.")
        raise ConfigError(f"{what}: there is no other rank to place. {instead}, or raise tensor_parallel_size.")
    if size > 1 and config.deterministic is False and config.device != "cuda":
        raise ConfigError(
            f"tensor_parallel_size={size} and deterministic=False are both set: on a CPU a cut model has the bits of "
            "one that is whole. Give one of them."
        )


def check_stages(config: Any) -> None:
    """Raise `ConfigError` for an option that an engine of several stages does not have. `config`: an `EngineConfig`."""
    size = config.pipeline_parallel_size
    if size == 1:
        return
    found = {
        'device="cuda"': (config.device == "cuda", "stages run on CPUs, and devices are cut by tensor_parallel_size"),
        'executor="ray"': (config.executor == "ray", "stages are processes of one machine"),
        "deterministic=False": (config.deterministic is False, "stages have the bits of one process"),
        "async_scheduling=True": (config.async_scheduling is True, "as many steps are in flight as there are stages"),
        "speculation": (config.speculates is not None, "a step behind drafts waits for them, which empties the pipe"),
    }
    for other, (is_set, reason) in found.items():
        if is_set:
            what, advice = f"pipeline_parallel_size={size} and {other} are both set", other.partition("=")[0]
            raise ConfigError(f"{what}: {reason}. Leave {advice} out.")


def check_data_parallel(config: Any) -> None:
    """Raise `ConfigError` for an option that engines which divide experts do not serve. `config`: an `EngineConfig`."""
    size, one_process = config.data_parallel_size, "an engine that divides experts with others is one process"
    if size == 1:
        return
    ranks, stages, connector = config.tensor_parallel_size, config.pipeline_parallel_size, config.kv_connector
    found = {
        'device="cuda"': (config.device == "cuda", "experts are divided over engines on CPUs"),
        "deterministic=False": (config.deterministic is False, "divided experts have the bits of one engine"),
        f"tensor_parallel_size={ranks}": (ranks > 1, one_process),
        f"pipeline_parallel_size={stages}": (stages > 1, one_process),
        f"quantization={config.quantization!r}": (config.quantization is not None, "divided experts are not rounded"),
        f"speculation={config.speculation!r}": (config.speculation != "off", "engines in lock step draft nothing"),
        "async_scheduling=True": (config.async_scheduling is True, "engines in lock step schedule no step ahead"),
        f"kv_connector={connector!r}": (connector is not None, "no such engine has a digest of all weights"),
        "load_format='sharded'": (config.load_format == "sharded", "no sharded state has parts of such engines"),
    }
    for other, (is_set, reason) in found.items():
        if is_set:
            raise ConfigError(f"data_parallel_size={size} and {other} are both set: {reason}. Give one of them.")
