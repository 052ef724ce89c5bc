"""The trainer of adapters for clients of Tinker's protocol: `HttpServer(engine, ServeOptions(tinker=...), trainer)`."""

from envs_adapters.trainers.lora_trainer import ExactLoraTrainer
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.lora_training import LoraTrainer
from rollout_engine.faces.verb_methods import Face


def lora_trainer(engine: Face) -> LoraTrainer:
    """A trainer of adapters of the model that an engine on the CPU serves; it loads the weights a second time.

    Raises `ConfigError` for a model that cannot be exact, and for an engine whose log-probs no trainer computes.
    """
    info = engine.frontend.client.info
    config = info.config
    for name, expected in (("device", "cpu"), ("quantization", None), ("deterministic", True)):
        if getattr(config, name) not in (expected, "auto"):
            shown = f"{name}={getattr(config, name)!r}"
            raise ConfigError(f"Adapters are trained for engines with {name}={expected!r}, not {shown}: leave it out.")
    return ExactLoraTrainer(
        config.model,
        info.dtype,
        max_rank=config.max_lora_rank,
        max_tokens=info.max_model_len,
        fp32_head=config.fp32_head,
    )
