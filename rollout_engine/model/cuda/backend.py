"""A loaded model at work on a CUDA device."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.pictures import EncodedPictures, Picture, SharedPictures
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.base.token_scores import TOKENS_ALONE, AskedScores, TokenScores
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.kernels.triton.rounding import compiles_kernels
from rollout_engine.model.backend import Backend
from rollout_engine.model.cuda import decoder_trial
from rollout_engine.model.cuda.adapters import CudaAdapterPool
from rollout_engine.model.cuda.attention import Limits
from rollout_engine.model.cuda.captured_graphs import can_capture
from rollout_engine.model.cuda.copy_stream import copy_stream_for
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs, graph_bytes
from rollout_engine.model.cuda.deterministic import make_modules_exact
from rollout_engine.model.cuda.largest_step import run_largest_step
from rollout_engine.model.cuda.memory import ReleasableMemory
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.ranked_graphs import RankedDecodeGraphs
from rollout_engine.model.cuda.row_invariance import ARITHMETIC, LATENT_KERNELS
from rollout_engine.model.cuda.runner import CudaRunner
from rollout_engine.model.cuda.sequence_logprobs import sequence_logprobs
from rollout_engine.model.cuda.shadow_memory import CudaShadowMemory
from rollout_engine.model.cuda.state_layers import STATE_KERNELS
from rollout_engine.model.cuda.warm_up import warm_up
from rollout_engine.model.cuda.weight_memory import CudaWeightMemory
from rollout_engine.model.kv_size import (
    DRAFT_SHARE,
    bytes_of_states,
    bytes_per_block,
    describe_pool,
    describe_states,
    most_blocks,
    size_pool,
    size_states,
)
from rollout_engine.model.modules.latent_attention import use_latent_kernels
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.model.modules.mixers import use_state_kernels
from rollout_engine.model.modules.routers import routers_of, routing_info
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.seat import Seat, described_ranks, score_together
from rollout_engine.model.ranks.wiring import connect
from rollout_engine.model.sampling.logits_processors import LogitsProcessor

logger = logging.getLogger("rollout_engine")

_LEAST_POOL = 0.25
"""The least share of the memory left by weights, steps and graphs that the KV pool gets before an update gets any."""


class CudaBackend(Backend):
    """Satisfies `backend.Backend`."""

    arithmetic = ARITHMETIC
    runs_ahead = True
    generates = True
    pooling = None
    max_prefill_beside_decode = 1 << 30
    """A device computes a longer step faster per token."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        processors: Sequence[LogitsProcessor],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._config = config
        self._loaded = loaded._replace(cut=loaded.cut and loaded.cut._replace(whole={}))
        deterministic = self.is_deterministic = config.deterministic is True
        device = next(loaded.module.parameters()).device
        self._seat: Seat | None = None if loaded.cut is None else loaded.cut.seat
        if loaded.cut is not None:
            _check_cut(loaded.cut)
            connect(loaded.module, loaded.cut, replaced_experts=False)
        use_latent_kernels(loaded.module, LATENT_KERNELS)
        use_state_kernels(loaded.module, STATE_KERNELS)
        self._fused = runs_fused(
            loaded, deterministic=deterministic, block_size=config.tokens_per_block, seat=self._seat
        )
        self.packed = PackedWeights(loaded.module)
        stream = copy_stream_for(device)
        self.adapters: CudaAdapterPool | None = None
        if self._fused:
            sizes = {"max_loras": config.max_loras, "max_rank": config.max_lora_rank}
            self.adapters = CudaAdapterPool(loaded.module, stream=stream, names=loaded.names, **sizes)
        model_len = config.max_model_len or loaded.max_model_len
        self.routing = routing_info(routers_of(loaded.module))
        self.num_blocks = self._num_blocks(model_len)
        if self._seat is not None:
            self.num_blocks = min(self._seat.exchange.agree(self.num_blocks))
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
        self.num_state_slots = size_states(config, loaded, self.num_blocks, memory)
        context = min(model_len, self.num_blocks * config.tokens_per_block)
        model = self._model(self.num_blocks, context, self.num_state_slots)
        self.runner: CudaRunner = CudaRunner(
            model,
            vocab_size=loaded.vocab_size,
            processors=processors,
            shares_prefixes=config.enable_prefix_caching,
            grammars=grammars,
            seat=self._seat,
        )
        if compiles_kernels():
            warm_up(self.runner)
        if config.cuda_graphs and self._fused and can_capture(model.device):
            self.runner.graphs = self._graphs(model)
            self.runner.graphs.capture_all()
            warm_up(self.runner)  # steps now run by graphs, if they fit
        self.shadow_memory = CudaShadowMemory(stream)
        self.upload = PinnedUpload(stream) if model.device.type == "cuda" else None
        graphs = self.runner.graphs
        self.choices = (
            f"device {model.device}{described_ranks(loaded.num_ranks)}, dtype {loaded.dtype}, "
            f"deterministic {deterministic}, "
            f"decoder {'fused' if self._fused else 'modules'}, "
            f"graphs {'off' if graphs is None else graphs.describe_count()}, "
            f"{describe_pool(config, loaded, self.num_blocks)}{describe_states(loaded, self.num_state_slots)}"
        )

    def score(
        self,
        sequences: Sequence[list[int]],
        num_prompt: Sequence[int],
        temperature: float,
        *,
        adapter_slot: int = -1,
        routed_experts: Sequence[np.ndarray] | None = None,
        pictures: SharedPictures | None = None,
        asked: AskedScores = TOKENS_ALONE,
    ) -> Iterator[dict[int, TokenScores]]:
        assert pictures is None, "refused on devices"
        given, options = (sequences, num_prompt, temperature), (adapter_slot, routed_experts, pictures, asked)
        return score_together(self._seat, self._score, *given, *options)

    def _score(self, *given: Any) -> Iterator[dict[int, TokenScores]]:
        without_pictures: tuple[Any, ...] = (*given[:-2], given[-1])
        return sequence_logprobs(self.runner.model, *without_pictures)

    def encode_pictures(self, pictures: Sequence[Picture], values: Callable[[str], Tensor]) -> EncodedPictures:
        raise AssertionError("refused on devices")

    def reset_encoder_cache(self) -> None:
        """Do nothing: pictures are not encoded on a device."""

    def memory_of(self, weights: Sequence[Tensor]) -> CudaWeightMemory:
        return CudaWeightMemory(weights, self.runner)

    def _model(self, num_blocks: int, context: int, num_state_slots: int = 0) -> CudaModel:
        return CudaModel(
            self._loaded.module,
            self._loaded.geometry,
            num_blocks=num_blocks,
            num_state_slots=num_state_slots,
            block_size=self._config.tokens_per_block,
            limits=Limits(self._config.max_num_batched_tokens, self._config.max_num_seqs, context),
            fused=self._fused,
            deterministic=self._config.deterministic is True,
            adapters=self.adapters,
            routing=self.routing,
        )

    def _graphs(self, model: CudaModel) -> DecodeGraphs:
        kind: Callable[..., DecodeGraphs] = (
            DecodeGraphs if self._seat is None else partial(RankedDecodeGraphs, seat=self._seat)
        )
        return kind(
            model,
            self.runner.rows,
            self._config.max_num_seqs,
            vocab_size=self._loaded.vocab_size,
            shares_prefixes=self.runner.shared_unit is not None,
        )

    def _num_blocks(self, model_len: int) -> int:
        """Blocks of the KV pool: as given, or all that fit next to the largest step, graphs and an update's shadow."""
        config, device = self._config, next(self._loaded.module.parameters()).device
        if device.type != "cuda":
            return size_pool(config, self._loaded)
        if config.num_kv_blocks is not None or config.kv_cache_bytes is not None:
            return size_pool(config, self._loaded, torch.cuda.mem_get_info(device)[1])
        peak, graphs = self._peak_bytes(model_len, device), self._graph_bytes()
        free, total = torch.cuda.mem_get_info(device)
        foreign = total - free - torch.cuda.memory_reserved(device)
        room = int(total * config.gpu_memory_utilization) - foreign - peak - graphs
        room -= self._update_bytes(room)
        room -= self._draft_bytes(room)
        states = bytes_of_states(config, self._loaded, room, total)
        room -= states
        routed = 0 if self.routing is None else self.routing.num_token_bytes * config.tokens_per_block
        block_bytes = bytes_per_block(self._loaded, config.tokens_per_block) + routed
        most = most_blocks(config, self._loaded)
        num_blocks = room // block_bytes if block_bytes else most  # no layer attends
        if num_blocks * config.tokens_per_block < min(model_len, 64):
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} leaves {room} bytes for the KV pool: of "
                f"{total}, others take {foreign}, weights and the largest step {peak}, CUDA graphs {graphs}, states "
                f"of sequences {states}. Give more, or shorter steps."
            )
        return min(num_blocks, most)

    @property
    def _drafting(self) -> SpeculationConfig | None:
        """The speculation by a draft model, whose weights are loaded before; None without one."""
        speculation = self._config.speculates
        return None if speculation is None or speculation.draft_model is None else speculation

    def _draft_bytes(self, room: int) -> int:
        """Bytes of `room` to leave for the KV of a draft model."""
        if self._drafting is None:
            return 0
        given = self._drafting.draft_kv_cache_bytes
        return room // (DRAFT_SHARE + 1) if given is None else given

    def _graph_bytes(self) -> int:
        """Bytes of the graphs of the policy, if it has some, and of a draft model."""
        config, loaded = self._config, self._loaded
        num_models = int(self._fused) + int(self._drafting is not None)
        if not config.cuda_graphs or not num_models:
            return 0
        return num_models * graph_bytes(config.max_num_seqs, loaded.vocab_size, loaded.dtype.itemsize)

    def _update_bytes(self, room: int) -> int:
        """Bytes of `room` to leave for an update's shadow: the size of the weights, or 0 if no pool would be left."""
        if not self._config.reserve_for_updates:
            return 0
        module = self._loaded.module
        num_bytes = ReleasableMemory([*module.parameters(), *module.buffers()]).num_bytes
        if num_bytes <= room * (1 - _LEAST_POOL):
            return num_bytes
        text = (
            "%.1f GiB are left beside the weights: no room for a second copy of them (%.1f GiB) beside a KV pool. "
            "Weight updates are made in place, and stop steps for as long as the transfer takes."
        )
        logger.warning(text, room / 2**30, num_bytes / 2**30)
        return 0

    def _peak_bytes(self, model_len: int, device: torch.device) -> int:
        """Bytes that the weights and the largest step take."""
        started = time.perf_counter()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            speculation = self._config.speculates
            num_drafted = 0 if speculation is None else speculation.max_draft_tokens
            run_largest_step(self._model(1, model_len), self._loaded.vocab_size, num_drafted)
        except torch.OutOfMemoryError as problem:
            advice = "Lower max_num_batched_tokens, max_num_seqs or max_model_len."
            raise ConfigError(f"The largest step does not fit the device ({problem}). {advice}") from None
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        logger.info("The largest step was measured in %.1f s: %.0f MiB.", time.perf_counter() - started, peak / 2**20)
        return peak


def runs_fused(loaded: LoadedModel, *, deterministic: bool, block_size: int, seat: Seat | None = None) -> bool:
    """Whether our kernels run the layers of `loaded`; logs the reason if not, as a warning if they fail here.

    `deterministic` layers of another structure then run as a trainer's modules do. `seat`: of a rank; all call this
    together. Raises `ConfigError` if `deterministic` layers cannot be had.
    """
    reason = decoder_trial.unsupported_reason(
        loaded.module, loaded.geometry, deterministic=deterministic, block_size=block_size, seat=seat
    )
    if reason is not None and deterministic:
        make_modules_exact(loaded, reason, block_size=block_size)
    if reason is not None:
        level = logging.WARNING if reason.is_failure else logging.INFO
        logger.log(level, "The layers run as modules, more slowly: %s.", reason.text)
    return reason is None


def _check_cut(cut: ModelCut) -> None:
    """Raise `ConfigError` for a cut that ranks do not compute on devices."""
    what = f"tensor_parallel_size={cut.seat.num_ranks} with device='cuda'"
    others = [type(child).__name__ for child, _ in cut.experts if not hasattr(child, "_is_expert_parallel")]
    if others:
        raise ConfigError(f"{what}: {others[0]} cannot be divided among devices. Leave tensor_parallel_size out.")
