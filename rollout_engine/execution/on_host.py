"""A loaded model at work on the CPU."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.execution.kv_size import bytes_per_block, size_pool
from rollout_engine.execution.scoring import score
from rollout_engine.execution.shadow import HostMoves
from rollout_engine.model import decoder_trial
from rollout_engine.model.deterministic import make_deterministic
from rollout_engine.model.forward import PagedModel
from rollout_engine.model.loader import LoadedModel
from rollout_engine.model.logits_processors import LogitsProcessor
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.model.residence import release_derived, release_weights, resident_bytes
from rollout_engine.model.runner import ModelRunner

logger = logging.getLogger("rollout_engine")


class HostModel:
    """Satisfies `devices.Served`."""

    runs_ahead = False
    crossing = None
    max_prefill_beside_decode = 512
    """A CPU computes a longer step no faster per token; it would only keep those waiting who decode."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, processors: Sequence[LogitsProcessor]) -> None:
        is_deterministic = config.deterministic is not False and _made_deterministic(config, loaded)
        self.packed = PackedWeights(loaded.module)
        model_len = config.max_model_len or loaded.max_model_len
        self.num_blocks = size_pool(config, loaded.geometry, loaded.dtype, model_len)
        obstacle = decoder_trial.obstacle(loaded.module, loaded.geometry)
        if obstacle is not None:
            logger.info("The layers run as modules, more slowly: %s.", obstacle)
        model = PagedModel(
            loaded.module,
            loaded.geometry,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            compiled=obstacle is None,
        )
        self._vocab_size = loaded.vocab_size
        self.moves = HostMoves()
        self.runner = ModelRunner(model, vocab_size=loaded.vocab_size, processors=processors)
        pool_mib = self.num_blocks * bytes_per_block(loaded.geometry, config.block_size, loaded.dtype) / 2**20
        self.choices = (
            f"device cpu, dtype {_described_dtype(loaded)}, {torch.get_num_threads()} threads, "
            f"deterministic {is_deterministic}, {'float32 head, ' if config.fp32_head else ''}"
            f"decoder {'modules' if obstacle is not None else 'compiled'}, "
            f"KV pool {self.num_blocks} blocks of {config.block_size} tokens ({pool_mib:.0f} MiB)"
        )

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""
        return score(
            self.runner.model.module, sequences, num_prompt, temperature=temperature, vocab_size=self._vocab_size
        )

    def memory_of(self, weights: Sequence[Tensor]) -> "HostWeights":
        """Of these and what is packed."""
        return HostWeights(weights, self.packed, self.runner.model)


class HostWeights:
    """Satisfies `devices.WeightMemory`: pages go back to the system and come again when they are written."""

    def __init__(self, weights: Sequence[Tensor], packed: PackedWeights, model: PagedModel) -> None:
        self._weights, self._packed, self._model = weights, packed, model

    @property
    def num_bytes(self) -> int:
        """Resident now."""
        return resident_bytes([*self._weights, *self._packed.panels])

    def release(self, *, forget: bool) -> None:
        """Free packed copies; with `forget` the weights."""
        if self._model.decoder is not None:
            self._model.decoder.release()
        release_derived(self._packed, forget=forget)
        if forget:
            release_weights(self._weights)

    def derive(self) -> None:
        """Pack again."""
        self._packed.make()

    def take_back(self) -> None:
        """Memory comes as it is written."""


def _described_dtype(loaded: LoadedModel) -> str:
    stored = loaded.stored_dtype
    return str(loaded.dtype) if stored in (None, loaded.dtype) else f"{loaded.dtype} (stored as {stored})"


def _made_deterministic(config: EngineConfig, loaded: LoadedModel) -> bool:
    obstacle = make_deterministic(loaded.module, loaded.geometry, fp32_head=config.fp32_head)
    if obstacle is not None and config.deterministic is True:
        raise ConfigError(f"deterministic=True is not possible: {obstacle}. Use deterministic=False.")
    if obstacle is not None:
        logger.warning("deterministic='auto' is off, log-probs may differ from the trainer's: %s.", obstacle)
    return obstacle is None
