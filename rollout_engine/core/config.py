"""Options of the core."""

import sys
from collections.abc import Sequence
from typing import Literal

import msgspec

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import PictureInfo, PlacedPicture
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.base.speculation_config import DraftInfo, SpeculationConfig

_MAX_PROMPT_LOGITS = 1 << 25
"""Logits of prompt tokens in one step: 64 MiB as bfloat16."""


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of the core; users set them by `EngineConfig`."""

    num_blocks: int
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Most tokens of one sequence, prompt included."""
    max_num_seqs: int
    """Most sequences that run at the same time."""
    max_num_batched_tokens: int
    """Most tokens computed in one step, unless a picture that must not be split needs more."""
    vocab_size: int
    max_prefill_beside_decode: int = sys.maxsize
    """Most tokens, in chunks of more than one, of a step in which other sequences decode and wait for all of it."""
    enable_prefix_caching: bool = True
    admission: Literal["queue", "reject"] = "queue"
    async_scheduling: bool = False
    """Submit the next step before the result of the last one is in."""
    speculation: SpeculationConfig | None = None
    """How tokens are drafted; None: not at all."""
    max_loras: int = 8
    """Most adapters held at a time."""
    step_seconds: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of steps, ascending in rows, two at least if tokens are drafted."""
    drafted_step_seconds: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of steps in which some rows are drafted tokens; empty: as `step_seconds`."""
    draft: DraftInfo | None = None
    """Sizes of the draft model, if there is one."""
    generates: bool = True
    """Whether the model has an output head."""
    pooling: PoolingInfo | None = None
    """Kinds of pooling that the model offers; None: the runner does not pool."""
    routing: RoutingInfo | None = None
    """The model's routers, whose choices the runner returns; None: it does not."""
    num_state_slots: int = 0
    """Slots for states of sequences, one more than `max_num_seqs` at least; 0: the model's layers keep none."""
    state_interval: int = 512
    """Tokens of a prompt from one snapshot of its state to the next; a multiple of `block_size`."""
    pictures: PictureInfo | None = None
    """How the model takes pictures; None: it has no vision tower."""
    max_prompt_pictures: int = 8
    """Most pictures of one prompt."""
    has_tier: bool = False
    """Whether a KV connector holds blocks outside of the pool."""
    num_stages: int = 1
    """Stages of the runner: as many steps are in flight, and no two of them draw for the same sequence."""

    @property
    def num_ahead(self) -> int:
        """Steps that are submitted before the result of the oldest one is waited for."""
        return int(self.async_scheduling) if self.num_stages == 1 else self.num_stages - 1

    @property
    def max_scored_tokens(self) -> int:
        """Most prompt tokens in one step whose log-probs were asked for; a picture bends it as it does the budget."""
        return max(1, _MAX_PROMPT_LOGITS // self.vocab_size)

    def whole_pictures(self, request: EngineCoreRequest) -> Sequence[PlacedPicture]:
        """The pictures of a request that no step may split: their tokens see one another in both directions."""
        return () if self.pictures is None or self.pictures.attention == "causal" else request.pictures

    def pools_beyond_last(self, params: PoolingParams | None) -> bool:
        """Whether a request pools hidden states of tokens before the last: the prefix cache must not skip any."""
        return params is not None and self.pooling is not None and self.pooling.positions(params) != "last"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__[:7]:
            assert getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1"
        if self.num_state_slots:
            least, size = self.max_num_seqs + 1, self.block_size
            assert self.num_state_slots >= least, f"num_state_slots={self.num_state_slots} must be at least {least}"
            is_multiple = self.state_interval >= 1 and self.state_interval % size == 0
            assert is_multiple, f"state_interval={self.state_interval} must be a multiple of {size}"
