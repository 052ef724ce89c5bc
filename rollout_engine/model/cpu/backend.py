"""A loaded model at work on the CPU."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.pictures import EncodedPictures, Picture, PlacedPicture, SharedPictures
from rollout_engine.base.token_scores import TOKENS_ALONE, AskedScores, TokenScores
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.kernels import linear
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.backend import Backend
from rollout_engine.model.cpu import decoder_trial
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.model.cpu.deterministic import make_deterministic
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.cpu.row_invariance import ARITHMETIC
from rollout_engine.model.cpu.runner import CpuRunner
from rollout_engine.model.cpu.sequence_logprobs import sequence_logprobs
from rollout_engine.model.cpu.shadow_memory import CpuShadowMemory
from rollout_engine.model.cpu.stage_trial import try_stage
from rollout_engine.model.cpu.weight_memory import CpuWeightMemory
from rollout_engine.model.kv_size import describe_pool, describe_states, size_pool, size_states
from rollout_engine.model.modules.composites import PICTURES
from rollout_engine.model.modules.heads import head_of, pooling_info
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.model.modules.placed_features import placing, take_placed_features
from rollout_engine.model.modules.prefix_trial import shares_prefixes
from rollout_engine.model.packing.linear_groups import linear_groups
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.model.pictures.encoder import PictureEncoder
from rollout_engine.model.pictures.scored_rows import features_of_rows
from rollout_engine.model.pictures.step_inputs import SequencesWithPictures
from rollout_engine.model.pictures.tower import attach_tower
from rollout_engine.model.pictures.tower_digest import Values
from rollout_engine.model.pooling.pooler import Pooler
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.seat import Seat, described_ranks, score_together
from rollout_engine.model.sampling.logits_processors import LogitsProcessor

logger = logging.getLogger("rollout_engine")


class CpuBackend(Backend):
    """Satisfies `backend.Backend`."""

    arithmetic = ARITHMETIC
    runs_ahead = False
    upload = None
    max_prefill_beside_decode = 512
    """A CPU computes a longer step no faster per token; it would only delay the sequences that decode."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        processors: Sequence[LogitsProcessor],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.is_deterministic = config.deterministic is not False and _made_deterministic(config, loaded)
        cut = loaded.cut
        if cut is not None:
            _check_products(loaded.module, cut, is_deterministic=self.is_deterministic)
        pictures = _sequences_with_pictures(config, loaded)
        self.packed = PackedWeights(loaded.module, config.num_ranks)
        self.num_blocks = size_pool(config, loaded.of_all_stages)
        self.num_state_slots = size_states(config, loaded.of_all_stages, self.num_blocks)
        if cut is not None:
            self.num_blocks = cut.seat.team.agree(self.num_blocks)[0]
            self.num_state_slots = cut.seat.team.agree(self.num_state_slots)[0]
        self._seat: Seat | None = None if cut is None else cut.seat
        reason = decoder_trial.unsupported_reason(loaded.module, loaded.geometry, cut)
        if reason is not None:
            logger.info("The layers run as modules, more slowly: %s.", reason)
        self.adapters = None
        if self.is_deterministic:
            sizes = {"max_loras": config.max_loras, "max_rank": config.max_lora_rank}
            elsewhere = None if cut is None or cut.stage is None else cut.stage.elsewhere
            self.adapters = CpuAdapterPool(loaded.module, names=loaded.names, elsewhere=elsewhere, **sizes)
        if pictures is not None:
            pictures.encoder.adapters = self.adapters
        model = CpuModel(
            loaded.module,
            loaded.geometry,
            num_blocks=self.num_blocks,
            block_size=config.tokens_per_block,
            num_state_slots=self.num_state_slots,
            compiled=reason is None,
            adapters=self.adapters,
            cut=cut,
        )
        if model.stage is not None:
            try_stage(model)
        self._vocab_size = loaded.vocab_size
        self.shadow_memory = CpuShadowMemory()
        self.generates = loaded.head_kind is None
        self.pooling = pooling_info(loaded.module, loaded.head_kind)
        pooler = Pooler(self.pooling, head_of(loaded.module))
        self.runner = CpuRunner(
            model,
            vocab_size=loaded.vocab_size,
            processors=processors,
            pooler=pooler,
            grammars=grammars,
            seat=self._seat,
            pictures=pictures,
        )
        self.routing = self.runner.routing.info
        self.choices = self._describe_choices(config, loaded)

    def _describe_choices(self, config: EngineConfig, loaded: LoadedModel) -> str:
        ranks = described_ranks(loaded.num_ranks, config.pipeline_parallel_size)
        return (
            f"device cpu{ranks}, dtype {_described_dtype(loaded)}, "
            f"{torch.get_num_threads()} threads, "
            f"deterministic {self.is_deterministic}, {'float32 head, ' if config.fp32_head else ''}"
            f"{'' if config.quantization is None else f'layers in {config.quantization}, '}"
            f"decoder {'modules' if self.runner.model.decoder is None else 'compiled'}, "
            f"{describe_pool(config, loaded, self.num_blocks)}{describe_states(loaded, self.num_state_slots)}"
            f"{'' if self.runner.pictures is None else ', pictures'}"
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
        given, options = (sequences, num_prompt, temperature), (adapter_slot, routed_experts, pictures, asked)
        return score_together(self._seat, self._score, *given, *options)

    def _score(
        self,
        sequences: Sequence[list[int]],
        num_prompt: Sequence[int],
        temperature: float,
        adapter_slot: int,
        routed_experts: Sequence[np.ndarray] | None,
        pictures: SharedPictures | None,
        asked: AskedScores,
    ) -> Iterator[dict[int, TokenScores]]:
        placed = None if pictures is None else pictures.place_all()

        @contextmanager
        def around(members: list[int], num_columns: int, num_tokens: int) -> Iterator[None]:
            with ExitStack() as contexts:
                if self.adapters is not None and adapter_slot >= 0:
                    contexts.enter_context(self.adapters.active(AdapterRows.of([adapter_slot], [num_tokens])))
                if routed_experts is not None:
                    given = [routed_experts[index] for index in members]
                    contexts.enter_context(self.runner.routing.replaying(given, num_columns))
                if placed is not None:
                    ids, own = [sequences[index] for index in members], [placed[index] for index in members]
                    contexts.enter_context(self._placing(ids, own, num_columns, adapter_slot))
                yield

        yield from sequence_logprobs(
            self.runner.model.module,
            sequences,
            num_prompt,
            temperature=temperature,
            vocab_size=self._vocab_size,
            asked=asked,
            around=around,
            shared=placed is None and routed_experts is None and self._shares_prefixes(),
        )

    def _shares_prefixes(self) -> bool:
        """Whether beginnings that sequences share may be scored once. All ranks call it together, and agree."""
        if not self.is_deterministic:
            return False
        if self._seat is not None and self._seat.pipe is not None:
            return False  # the trial would need all layers
        with torch.no_grad():
            shares = shares_prefixes(self.runner.model.module)
        return shares if self._seat is None else self._seat.all_agree(shares)

    def _placing(
        self, rows: list[list[int]], placed: list[list[PlacedPicture]], num_columns: int, adapter_slot: int
    ) -> AbstractContextManager[None]:
        assert self.runner.pictures is not None, "a model without pictures is given none"
        take_placed_features(self.runner.model.module.base_model)
        return placing(features_of_rows(self.runner.pictures, rows, placed, num_columns, adapter_slot))

    def encode_pictures(self, pictures: Sequence[Picture], values: Values) -> EncodedPictures:
        assert self.runner.pictures is not None, "a model without pictures is given none"
        return self.runner.pictures.encoder.encode_arrays(pictures, lambda name: values(f"{PICTURES}.{name}"))

    def reset_encoder_cache(self) -> None:
        if self.runner.pictures is not None:
            self.runner.pictures.reset()

    def memory_of(self, weights: Sequence[Tensor]) -> CpuWeightMemory:
        return CpuWeightMemory(weights, self.packed, self.runner.model)


def _sequences_with_pictures(config: EngineConfig, loaded: LoadedModel) -> SequencesWithPictures | None:
    """Put the tower of a composite to work; None if it has none."""
    if loaded.tower is None or loaded.picture_info is None:
        return None
    tower = attach_tower(loaded.module, loaded.tower, ARITHMETIC.make_row_invariant)
    encoder = PictureEncoder(tower, loaded.dtype, config.encoder_cache_bytes)
    return SequencesWithPictures(encoder, loaded.picture_info.image_token_id, loaded.picture_info.attention)


def _described_dtype(loaded: LoadedModel) -> str:
    stored = loaded.stored_dtype
    return str(loaded.dtype) if stored in (None, loaded.dtype) else f"{loaded.dtype} (stored as {stored})"


def _made_deterministic(config: EngineConfig, loaded: LoadedModel) -> bool:
    as_int8 = config.quantization is not None
    reason = make_deterministic(
        loaded.module, loaded.geometry, fp32_head=config.fp32_head, as_int8=as_int8, cut=loaded.cut
    )
    if reason is not None and as_int8:
        raise ConfigError(f"quantization={config.quantization!r} is not possible: {reason}. Leave it out.")
    if as_int8:
        logger.warning(
            "quantization=%r: layers multiply by rounded weights, so log-probs, those of score() too, are close to the "
            "trainer's and not equal to them.",
            config.quantization,
        )
    if reason is not None and config.deterministic is True:
        raise ConfigError(f"deterministic=True is not possible: {reason}. Use deterministic=False.")
    if reason is not None:
        logger.warning("deterministic='auto' is off, log-probs may differ from the trainer's: %s.", reason)
    return reason is None


def _check_products(module: nn.Module, cut: ModelCut, *, is_deterministic: bool) -> None:
    """Raise `ConfigError` if products of some columns may have other bits than products of all."""
    size, group = cut.seat.num_ranks, cut.group
    if cut.stage is not None and not is_deterministic:
        raise ConfigError(
            f"pipeline_parallel_size={cut.stage.pipe.num_stages} needs deterministic products, because sequences are "
            "divided among steps, and the model's are not (a part of it was not replaced). Leave it out."
        )
    if not is_deterministic:
        option = f"tensor_parallel_size={size}" if group is None else f"data_parallel_size={group.size}"
        raise ConfigError(
            f"{option} needs deterministic products, whose rows and columns do not depend on one another, "
            "and the model's are not (deterministic=False, or a part of it that was not replaced). Leave it out."
        )
    if cut.is_tensor_parallel and any(group.plan.kernel != linear.OWN for group in linear_groups(module)):
        raise ConfigError(
            f"tensor_parallel_size={size} needs products by our own C++ kernel, and on this CPU another library "
            "multiplies. Leave it out."
        )
