"""Sizes of a loaded model. It is read by processes without the model: front ends, and starters of cores."""

import msgspec

from rollout_engine.base.pictures import PictureInfo
from rollout_engine.base.pooling_params import PoolingInfo
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.base.speculation_config import DraftInfo


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model that the core and its clients need."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    max_prefill_beside_decode: int
    """Most tokens, in chunks of more than one, of a step in which other sequences decode; see `CoreConfig`."""
    choices: str
    """Every choice made at start-up, for one log line."""
    made_with: dict[str, str] = {}
    """Versions of the libraries, the machine and the instruction set: with others, bits may be others."""
    generates: bool = True
    """Whether it has an output head; a checkpoint that classifies has none."""
    pooling: PoolingInfo | None = None
    """Kinds of pooling that the model offers; None: none, on this device."""
    routing: RoutingInfo | None = None
    """Its routers, whose choices requests may ask for; None: it has none that are all alike, or runs on a device."""
    step_seconds: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of steps by their number of rows, measured at load if tokens are drafted; see `CoreConfig`."""
    drafted_step_seconds: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of steps in which some rows are drafted tokens, measured on devices; empty: as `step_seconds`."""
    draft: DraftInfo | None = None
    """Sizes of the draft model, if there is one."""
    num_state_slots: int = 0
    """Slots of the pool of states; 0: no layer keeps any."""
    pictures: PictureInfo | None = None
    """How it takes pictures; None: it has no vision tower."""
    kv_handshake: dict[str, str] = {}
    """Metadata of the KV connector for the other engines of a fleet; empty without one."""
