"""A loaded model at work on a device. Imported only where its kernels serve (`devices`)."""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.execution.kv_size import bytes_per_block, size_pool
from rollout_engine.model.device import trial
from rollout_engine.model.device.compile_trial import compiled_layers
from rollout_engine.model.device.compiled import CompiledLayers
from rollout_engine.model.device.graphs import DecodeGraphs
from rollout_engine.model.device.lane import lane_of
from rollout_engine.model.device.largest_step import run_largest_step
from rollout_engine.model.device.memory import Memory
from rollout_engine.model.device.model import DeviceModel
from rollout_engine.model.device.pinned import PinnedCrossing
from rollout_engine.model.device.pool import Limits
from rollout_engine.model.device.runner import DeviceRunner
from rollout_engine.model.device.scoring import score
from rollout_engine.model.device.weight_moves import DeviceMoves
from rollout_engine.model.loader import LoadedModel
from rollout_engine.model.logits_processors import LogitsProcessor
from rollout_engine.model.packed_weights import PackedWeights

logger = logging.getLogger("rollout_engine")


class DeviceServing:
    """Satisfies `devices.Served`."""

    runs_ahead = True
    max_prefill_beside_decode = 1 << 30
    """A device computes a longer step faster per token."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, processors: Sequence[LogitsProcessor]) -> None:
        self._loaded = loaded
        is_ordered = config.deterministic is True
        obstacle = trial.obstacle(loaded.module, loaded.geometry, is_ordered=is_ordered)
        if obstacle is not None and is_ordered:
            raise ConfigError(f"deterministic=True is not possible on a device: {obstacle}. Use deterministic=False.")
        if obstacle is not None:
            logger.info("The layers run as modules, more slowly: %s.", obstacle)
        self._fused, self._is_ordered = obstacle is None, is_ordered
        self.packed = PackedWeights(loaded.module)
        model_len = config.max_model_len or loaded.max_model_len
        self._compiled = self._compiled_layers(_limits(config, model_len)) if config.compile else None
        self.num_blocks = self._num_blocks(config, model_len)
        context = min(model_len, self.num_blocks * config.block_size)
        model = self._model(config, self.num_blocks, context)
        self.runner = DeviceRunner(
            model, vocab_size=loaded.vocab_size, processors=processors, shares_prefixes=config.enable_prefix_caching
        )
        graphs = None
        if config.cuda_graphs and self._fused and model.device.type == "cuda":
            graphs = self.runner.graphs = DecodeGraphs(
                model,
                self.runner.rows,
                config.max_num_seqs,
                vocab_size=loaded.vocab_size,
                shares_prefixes=config.enable_prefix_caching,
            )
            graphs.capture_all()
        lane = lane_of(model.device)
        self.moves = DeviceMoves(lane)
        self.crossing = PinnedCrossing(lane) if model.device.type == "cuda" else None
        pool_mib = self.num_blocks * bytes_per_block(loaded.geometry, config.block_size, loaded.dtype) / 2**20
        self.choices = (
            f"device {model.device}, dtype {loaded.dtype}, deterministic {is_ordered}, "
            f"decoder {self._decoder}, graphs {'on' if graphs is not None else 'off'}, "
            f"KV pool {self.num_blocks} blocks of {config.block_size} tokens ({pool_mib:.0f} MiB)"
        )

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[np.ndarray]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt, under the live weights."""
        return score(self.runner.model, self._loaded.geometry, sequences, num_prompt, temperature)

    def memory_of(self, weights: Sequence[Tensor]) -> "DeviceWeights":
        """Of these."""
        return DeviceWeights(weights, self.runner)

    def _model(self, config: EngineConfig, num_blocks: int, context: int) -> DeviceModel:
        return DeviceModel(
            self._loaded.module,
            self._loaded.geometry,
            num_blocks=num_blocks,
            block_size=config.block_size,
            limits=_limits(config, context),
            fused=self._fused,
            is_ordered=self._is_ordered,
            compiled=self._compiled,
        )

    @property
    def _decoder(self) -> str:
        if self._fused:
            return "fused"
        return "modules" if self._compiled is None else "modules, layers compiled"

    def _compiled_layers(self, limits: Limits) -> CompiledLayers | None:
        if self._fused:
            logger.info("compile=True has nothing to do: the layers run by our own kernels around matrix products.")
            return None
        return compiled_layers(self._loaded.module, self._loaded.geometry, limits)

    def _num_blocks(self, config: EngineConfig, model_len: int) -> int:
        """As given, or what the largest step leaves of `gpu_memory_utilization`."""
        device = next(self._loaded.module.parameters()).device
        if device.type != "cuda" or config.num_kv_blocks is not None or config.kv_cache_bytes is not None:
            return size_pool(config, self._loaded.geometry, self._loaded.dtype, model_len)
        started = time.perf_counter()
        torch.cuda.reset_peak_memory_stats(device)
        block_bytes = bytes_per_block(self._loaded.geometry, config.block_size, self._loaded.dtype)
        try:
            model = self._model(config, 1, model_len)
            run_largest_step(model, self._loaded.vocab_size)
        except torch.OutOfMemoryError as problem:
            advice = "Lower max_num_batched_tokens, max_num_seqs or max_model_len."
            raise ConfigError(f"The largest step does not fit the device ({problem}). {advice}") from None
        del model
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        foreign = total - free - torch.cuda.memory_reserved(device)
        room = int(total * config.gpu_memory_utilization) - foreign - peak
        num_blocks = room // block_bytes
        if num_blocks * config.block_size < min(model_len, 64):
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} leaves {room} bytes for the KV pool: of "
                f"{total}, others take {foreign}, weights and the largest step {peak}. Give more, or shorter steps."
            )
        logger.info("The largest step was measured in %.1f s: %.0f MiB.", time.perf_counter() - started, peak / 2**20)
        return min(num_blocks, config.max_num_seqs * -(-model_len // config.block_size))


def _limits(config: EngineConfig, context: int) -> Limits:
    return Limits(config.max_num_batched_tokens, config.max_num_seqs, context)


class DeviceWeights:
    """Satisfies `devices.WeightMemory`: nothing is derived from weights. Asleep they leave the device."""

    def __init__(self, weights: Sequence[Tensor], runner: DeviceRunner) -> None:
        self._memory, self._runner = Memory(weights), runner

    @property
    def num_bytes(self) -> int:
        """Held on the device now."""
        return self._memory.num_bytes

    def release(self, *, forget: bool) -> None:
        """Give memory back, that of graphs too; values wait on the host unless it is to `forget` them."""
        if self._runner.graphs is not None:
            self._runner.graphs.void()  # they know addresses
        self._memory.release(keep=not forget)

    def derive(self) -> None:
        """Have the values on the device again."""
        self._memory.restore()

    def take_back(self) -> None:
        """Zeros, until they are written."""
        self._memory.restore()
