"""The interface of the two backends, `cpu` and `cuda`, for engines and for trainers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor, UntypedStorage, nn

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.pictures import EncodedPictures, Picture, SharedPictures
from rollout_engine.base.pooling_params import PoolingInfo
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.base.token_scores import TOKENS_ALONE, AskedScores, TokenScores
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.kernels.adapters import Added
from rollout_engine.kernels.entropy import FiguresKernel
from rollout_engine.kernels.token_logprobs import RowStatsKernel
from rollout_engine.model.adapters.pool import AdapterPool
from rollout_engine.model.modules.loaded_model import LoadedModel
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.model.sampling.logits_processors import LogitsProcessor
from sync.tensor_writer import Upload


class Arithmetic(NamedTuple):
    """Makes a trainer's module compute the same as an engine on the same kind of device."""

    attention_name: str
    """The attention function, as registered with Hugging Face's attention interface."""
    make_row_invariant: Callable[[nn.Module], None]
    """Replaces the parts of a causal LM, in place."""
    unproven_parts: Callable[[nn.Module], list[str]]
    """Names the parts of such a causal LM that may still compute a row otherwise than the engine."""
    row_stats: RowStatsKernel
    """Computes log-probs of given tokens."""
    add_adapter: Added
    """Adds a low-rank adapter to a product, as steps do."""
    row_figures: FiguresKernel
    """Computes entropies of rows of logits."""


class ShadowMemory(Protocol):
    """Memory for shadows of weights, and the copy from there over live weights."""

    @property
    def num_free_bytes(self) -> int:
        """Bytes that shadows may still take."""
        ...

    def allocate(self, num_bytes: int) -> UntypedStorage:
        """Memory for a shadow. Raises `WeightUpdateError` if there is none."""
        ...

    def beside_steps(self) -> AbstractContextManager[object]:
        """Order work launched inside after all work launched before; later steps neither wait for it nor delay it."""
        ...

    def prepare_copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """A function that copies every first of `pairs` over its second, as often as it is called, and waits for that.

        They are runs of bytes, uint8 [n], that keep their addresses; no two overlap.
        """
        ...


class WeightMemory(Protocol):
    """Memory of live weights, and of copies derived from them, as a sleeping engine gives it back."""

    @property
    def num_bytes(self) -> int:
        """Bytes held in the memory of the model's device."""
        ...

    def release(self, *, forget: bool) -> None:
        """Free tensors that `derive` can remake or restore. `forget`: free the weights too and lose their values."""
        ...

    def derive(self) -> None:
        """Undo `release(forget=False)`."""
        ...

    def take_back(self) -> None:
        """Allocate weights that were forgotten; they have no values yet."""
        ...


class Backend(Protocol):
    """A loaded model at work on one kind of device: a `CpuBackend` or a `CudaBackend`."""

    arithmetic: ClassVar[Arithmetic]
    runs_ahead: ClassVar[bool]
    """Whether steps run on the device while the host prepares others: the runner has `submit`, else `execute`."""
    max_prefill_beside_decode: ClassVar[int]
    """Most prefill tokens of a step in which other sequences decode, for `CoreConfig`."""
    runner: Any
    """Runs steps; holds the model, its KV pool and the state of sequences."""
    num_blocks: int
    """Blocks of the KV pool."""
    num_state_slots: int
    """Slots of the pool of states; 0: no layer keeps any."""
    is_deterministic: bool
    """Whether no row of any product depends on the others."""
    packed: PackedWeights
    shadow_memory: ShadowMemory
    upload: Upload | None
    """Writes weights from the host's memory to the device; None if they are in the host's memory."""
    generates: bool
    """Whether the model has an output head."""
    pooling: PoolingInfo | None
    """Kinds of pooling that it offers; None: none."""
    routing: RoutingInfo | None
    """Its routers, whose choices are returned and replayed; None if they are not."""
    adapters: AdapterPool | None
    """Adapters of the linears; None if they are not computed: on a CPU without `is_deterministic`, and on a
    device on which layers run as modules."""
    choices: str
    """Choices made at start-up, for one log line."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        processors: Sequence[LogitsProcessor],
        grammars: GrammarCompiler | None = None,
    ) -> None: ...

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
        """Yield, a piece at a time, the scores of some sequences by their index: of every token after the prompt.

        They are those under the live weights, and the adapter in a slot of `adapters`. A piece takes about as long as a
        step. `routed_experts`: of each sequence int16 [len - 1, L, k], the experts that
        its tokens go to; -1: as the routers choose. None without `routing`. `pictures`: of each sequence; None if the
        model takes none. Raises `ConfigError` for pictures that do not fit their spans.
        """
        ...

    def encode_pictures(self, pictures: Sequence[Picture], values: Callable[[str], Tensor]) -> EncodedPictures:
        """The features of pictures under the live weights, and no adapter.

        One without arrays stands for its digest: its features are given if they are kept. `values`: gives the live
        values of a weight by its name. Raises `ConfigError` for arrays that the model does not take as a picture.
        """
        ...

    def reset_encoder_cache(self) -> None:
        """Forget the features of all pictures: call it whenever weights have changed."""

    def memory_of(self, weights: Sequence[Tensor]) -> WeightMemory:
        """Memory of `weights`, which are all that are not packed."""
        ...
