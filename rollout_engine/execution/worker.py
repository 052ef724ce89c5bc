"""One device's share of the engine: the model, its KV pool, its weights."""

import logging

import msgspec
import numpy as np
import torch

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.execution.kv_size import bytes_per_block, cap_model_len, size_pool
from rollout_engine.execution.scoring import score
from rollout_engine.execution.weights import WeightUpdater
from rollout_engine.model import decoder_trial
from rollout_engine.model.deterministic import make_deterministic
from rollout_engine.model.forward import PagedModel
from rollout_engine.model.loader import LoadedModel, load_model
from rollout_engine.model.logits_processors import load_processors
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.model.residence import release_derived, release_weights
from rollout_engine.model.runner import ModelRunner

logger = logging.getLogger("rollout_engine")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end and the core need to know of a loaded model."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    choices: str
    """Every choice made at start-up, for one log line."""


class Worker:
    """Loads the model, sizes the KV pool, and owns `runner` (steps) and `updater` (weights)."""

    def __init__(self, config: EngineConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config)
        processors = load_processors(config.logits_processors, loaded.vocab_size)
        self._deterministic = config.deterministic is not False and _made_deterministic(config, loaded)
        self._packed = PackedWeights(loaded.module)
        num_blocks = size_pool(config, loaded.geometry, loaded.dtype, config.max_model_len or loaded.max_model_len)
        obstacle = decoder_trial.obstacle(loaded.module, loaded.geometry)
        if obstacle is not None:
            logger.info("The layers run as modules, more slowly: %s.", obstacle)
        model = PagedModel(
            loaded.module,
            loaded.geometry,
            num_blocks=num_blocks,
            block_size=config.block_size,
            compiled=obstacle is None,
        )
        self.runner = ModelRunner(model, vocab_size=loaded.vocab_size, processors=processors)
        self._weights = list(loaded.targets.values())
        self.updater = WeightUpdater(loaded.targets, loaded.aliases, self._packed)
        self.info = ModelInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=cap_model_len(config, loaded.max_model_len, num_blocks),
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            dtype=str(loaded.dtype).removeprefix("torch."),
            choices=self._choices(config, loaded, num_blocks),
        )

    def score(self, sequences: list[list[int]], num_prompt: list[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""
        module = self.runner.model.module
        return score(module, sequences, num_prompt, temperature=temperature, vocab_size=self.info.vocab_size)

    def release_kv(self) -> None:
        """Forget all KV and give its memory back to the system."""
        self.runner.model.kv.release()

    def release_weights(self, *, forget: bool) -> None:
        """Free packed copies and the shadow of updates; with `forget` the weights too."""
        self.updater.release(forget=forget)
        if self.runner.model.decoder is not None:
            self.runner.model.decoder.release()
        release_derived(self._packed)
        if forget:
            release_weights(self._weights)

    def restore_weights(self) -> None:
        """Pack the weights again."""
        self._packed.make()

    def _choices(self, config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> str:
        pool_mib = num_blocks * bytes_per_block(loaded.geometry, config.block_size, loaded.dtype) / 2**20
        return (
            f"{type(loaded.module).__name__} from {config.model}: device cpu, dtype {loaded.dtype}, "
            f"{torch.get_num_threads()} threads, deterministic {self._deterministic}, "
            f"decoder {'modules' if self.runner.model.decoder is None else 'compiled'}, "
            f"KV pool {num_blocks} blocks of {config.block_size} tokens ({pool_mib:.0f} MiB), "
            f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
        )


def _made_deterministic(config: EngineConfig, loaded: LoadedModel) -> bool:
    obstacle = make_deterministic(loaded.module, loaded.geometry)
    if obstacle is not None and config.deterministic is True:
        raise ConfigError(f"deterministic=True is not possible: {obstacle}. Use deterministic=False.")
    if obstacle is not None:
        logger.warning("deterministic='auto' is off, log-probs may differ from the trainer's: %s.", obstacle)
    return obstacle is None
