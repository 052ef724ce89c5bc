"""The functions that mixers call in place of transformers' own: causal convolutions, and recurrences over tokens.

    causal_conv1d_fn                            kernels.convolution
    torch_chunk_gated_delta_rule                kernels.recurrence, with the delta rule (Yang et al. 2024)
    chunk_kimi_delta_attention                  the same with a decay of each key channel (Kimi Linear, 2025)
    mamba2_chunk_scan                           kernels.recurrence without it (Dao and Gu 2024)
    mamba2_split_conv1d_scan_combined           None, as transformers' own without its package

Inside `keeping_states(step)` the rows of a call are the chunks of that step, whose states are read from slots and
written there. Outside, each row of a batch is a sequence of its own from zeros, or several packed ones, as attention
has them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels import activation
from rollout_engine.kernels.convolution import causal_convolution
from rollout_engine.kernels.dense_attention import TokensAt
from rollout_engine.kernels.recurrence import gated_recurrence, l2_normalised
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.state_kernels import StateKernels
from rollout_engine.model.modules.attention_interface import PositionsMissingError
from rollout_engine.model.modules.geometry import HARMLESS_TENSORS
from rollout_engine.model.modules.packed_rows import TOKEN_POSITIONS, packed_rows_expected, packed_sequences
from rollout_engine.model.modules.row_trial import proven_operations
from rollout_engine.model.modules.state_geometry import StateCall, recorded_calls

_HARMLESS = HARMLESS_TENSORS | {"cu_seqlens", TOKEN_POSITIONS}
KEY_EPSILON = 1e-6
"""Added to the squared norms of queries and keys."""
_running = threading.local()


class LayerStates(NamedTuple):
    """The states of one layer in all slots."""

    convolutions: list[Tensor]
    """[S, width - 1, C] of each convolution, in the model's dtype."""
    recurrence: Tensor | None
    """float32 [S, H, K, V]."""


class StateStep(NamedTuple):
    """The chunks of one step, and the states that they read and write."""

    chunks: StateChunks
    layers: Sequence[LayerStates | None]
    """By layer; None: it keeps no state."""


@contextmanager
def keeping_states(step: StateStep) -> Iterator[None]:
    """Inside, mixers of this thread's forwards compute the chunks of `step`."""
    _running.step = step
    try:
        yield
    finally:
        _running.step = None


class OwnHeads(NamedTuple):
    """Heads [first, stop) of a recurrence, which this process computes; other ranks compute the others."""

    first: int
    stop: int
    gather: Callable[[Tensor], Tensor]
    """These heads' outputs [S, h, V] -> those of all ranks [S, H, V]."""

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The own heads of a tensor that has all of them along `dim`."""
        return x.narrow(dim, self.first, self.stop - self.first)

    def take_groups(self, x: Tensor, num_heads: int) -> Tensor:
        """The groups of [B, T, G, K] that the own heads read, of `num_heads` in all: one for each, if they differ."""
        size = num_heads // x.shape[2]
        if self.first % size == self.stop % size == 0:
            return x[:, :, self.first // size : self.stop // size]
        groups = [head // size for head in range(self.first, self.stop)]
        if groups[0] == groups[-1]:
            return x[:, :, groups[:1]]
        return x[:, :, groups]


def give_own_heads(mixer: Any, heads: OwnHeads) -> None:
    """Let `mixer` compute these heads of its recurrence from now on."""
    mixer._own_heads = heads


def give_kernels(mixer: Any, kernels: StateKernels) -> None:
    """Let `mixer` compute by a device's kernels from now on."""
    mixer._state_kernels = kernels


class _Mixer:
    """A mixer whose forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.layer_idx = module, getattr(module, "layer_idx", None)
        self.num_convolutions = 0
        """Convolutions that this forward has computed."""

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def own_heads(self) -> OwnHeads | None:
        """The heads that this process computes; None: all."""
        return getattr(self.module, "_own_heads", None)

    @property
    def kernels(self) -> StateKernels | None:
        """A device's kernels; None: the CPU's."""
        return getattr(self.module, "_state_kernels", None)


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """Inside, functions of this thread are called by `module`."""
    before = getattr(_running, "mixer", None)
    _running.mixer = _Mixer(module)
    try:
        yield
    finally:
        _running.mixer = before


@contextmanager
def given_positions(position_ids: Tensor | None) -> Iterator[None]:
    """Inside, mixers of this thread separate packed sequences by these positions, which their layer is given."""
    before = getattr(_running, "positions", None)
    _running.positions = position_ids
    try:
        yield
    finally:
        _running.positions = before


class _Rows(NamedTuple):
    """How the tokens of a call [B, T] stand end to end."""

    chunks: StateChunks
    states: LayerStates | None
    """The slots of a step; None: a trainer's sequences begin with zeros."""
    tokens: Tensor | None = None
    """int64 [S]: which of the B * T each token of the chunks is; None: they are in order."""
    places: Tensor | None = None
    """int64 [B * T]: first occurrence of each in `tokens`."""

    @classmethod
    def of(cls, mixer: _Mixer, batch: int, length: int) -> "_Rows":
        step: StateStep | None = getattr(_running, "step", None)
        if step is None:
            return cls._of_trainer(mixer, batch, length)
        num_tokens = int(step.chunks.token_starts[-1])
        if batch != 1 or length != num_tokens:
            raise ConfigError(f"{mixer.name} computes {batch} x {length} tokens in a step of {num_tokens}: not served.")
        states = None if mixer.layer_idx is None else step.layers[mixer.layer_idx]
        if states is None:
            raise ConfigError(f"{mixer.name} keeps a state in layer {mixer.layer_idx}, and the probe saw none there.")
        return cls(step.chunks, states)

    @classmethod
    def _of_trainer(cls, mixer: _Mixer, batch: int, length: int) -> "_Rows":
        positions: Tensor | None = getattr(_running, "positions", None)
        if positions is None and packed_rows_expected():
            raise PositionsMissingError(
                f"The layers around {mixer.name} are not given position_ids, so packed rows would read one another's "
                "states. Give this model one sequence a row."
            )
        if positions is not None and positions.dim() == 3:  # of three axes of images, equal for text
            positions = positions[0]
        packed = packed_sequences(positions, batch, length)
        if packed is None:
            return cls(StateChunks.whole([length] * batch), None)
        return cls(StateChunks.whole(packed.lengths), None, packed.tokens, packed.places)

    def take(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> the tokens of the chunks [S, ...]."""
        rows = x.flatten(0, 1)
        if self.tokens is None:
            return rows
        found: Tensor = TokensAt.apply(rows.flatten(1)[None, None], self.tokens)[0, 0].unflatten(1, x.shape[2:])
        return found

    def put(self, rows: Tensor, batch: int) -> Tensor:
        """[S, ...] -> [B, T, ...]."""
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        found: Tensor = rows.unflatten(0, (batch, -1))
        return found


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """A depthwise convolution over the tokens before each: x [B, C, T], weight [C, W], bias [C] -> [B, C, T].

    `activation`: "silu" (or "swish"), or None. Raises `ConfigError` for others, and for other tensors.
    """
    mixer = _current_mixer("causal_conv1d_fn", others)
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"{mixer.name} convolves with activation={activation!r}; 'silu' or none is served.")
    batch, num_channels, length = hidden_states.shape
    if _record(mixer, convolution=(weight.shape[1] - 1, num_channels)):
        return torch.zeros_like(hidden_states)
    with torch._C.DisableTorchFunction(), proven_operations():
        rows = _Rows.of(mixer, batch, length)
        states = None if rows.states is None else rows.states.convolutions[mixer.num_convolutions]
        mixer.num_convolutions += 1
        x = rows.take(hidden_states.transpose(1, 2))
        kernel = None if mixer.kernels is None else mixer.kernels.convolution
        options: dict[str, Any] = {"silu": activation is not None, "chunks": rows.chunks, "states": states}
        out = causal_convolution(x, weight, bias, **options, kernel=kernel)
        return rows.put(out, batch).transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule: q and k [B, T, G, K], v [B, T, H, V], beta [B, T, H] -> ([B, T, H, V], None).

    `g`: logarithms of decays, [B, T, H], or [B, T, H, K] of each key channel. Raises `ConfigError` for a state that is
    given or asked for: mixers run without a cache.
    """
    mixer = _current_mixer("the gated delta rule", others, initial_state=initial_state)
    if output_final_state:
        raise _cache_error(mixer)
    if _record(mixer, recurrence=(value.shape[2], key.shape[3], value.shape[3])):
        return torch.zeros_like(value), None
    with torch._C.DisableTorchFunction(), proven_operations():
        rows, own, batch = _Rows.of(mixer, *value.shape[:2]), mixer.own_heads, len(value)
        if own is not None:
            query, key = (own.take_groups(x, value.shape[2]) for x in (query, key))
            value, g, beta = (own.take(x, 2) for x in (value, g, beta))
        q, k = (rows.take(x) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            normalise = None if mixer.kernels is None else mixer.kernels.normalise
            q, k = (l2_normalised(x, KEY_EPSILON, normalise) for x in (q, k))
        v, decay, rate = rows.take(value), rows.take(g).float(), rows.take(beta).float()
        out = _recur(mixer, rows, q, k, v, decay, rate, delta=True, scale=key.shape[3] ** -0.5)
        return rows.put(out if own is None else own.gather(out), batch), None


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Mamba 2's recurrence: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N], D [H] -> float32 [B, T, H, P].

    Raises `ConfigError` for a state that is given or asked for, and for a gate `z`.
    """
    mixer = _current_mixer("mamba2_chunk_scan", others, initial_states=initial_states, z=z)
    if return_final_states:
        raise _cache_error(mixer)
    if _record(mixer, recurrence=(hidden_states.shape[2], B.shape[3], hidden_states.shape[3])):
        return torch.zeros_like(hidden_states, dtype=torch.float32)
    with torch._C.DisableTorchFunction(), proven_operations():
        rows, own, batch = _Rows.of(mixer, *hidden_states.shape[:2]), mixer.own_heads, len(hidden_states)
        if own is not None:
            B, C = (own.take_groups(x, hidden_states.shape[2]) for x in (B, C))
            hidden_states, dt, A = own.take(hidden_states, 2), own.take(dt, 2), own.take(A, 0)
            D, dt_bias = (None if x is None else own.take(x, 0) for x in (D, dt_bias))
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = activation.softplus(dt)
        rate = rows.take(torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])).float()
        q, k, v = rows.take(C), rows.take(B), rows.take(hidden_states).float()
        skip = None if D is None else D.float()
        out = _recur(mixer, rows, q, k, v, rate * A.float(), rate, delta=False, scale=1.0, skip=skip)
        return rows.put(out if own is None else own.gather(out), batch)


def mamba2_split_conv1d_scan_combined(*args: Any, **kwargs: Any) -> None:
    """Mamba 2's kernel of a whole training step, which does nothing without its package: the parts run one by one."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_split_conv1d_scan_combined": mamba2_split_conv1d_scan_combined,
}
"""Names in modelling files of transformers, and the functions to call."""


def _recur(mixer: _Mixer, rows: _Rows, *tensors: Tensor, **options: Any) -> Tensor:
    states = None if rows.states is None else rows.states.recurrence
    kernel = None if mixer.kernels is None else mixer.kernels.recurrence
    return gated_recurrence(*tensors, chunks=rows.chunks, states=states, kernel=kernel, **options)


def _record(mixer: _Mixer, **shape: Any) -> bool:
    """Record a call inside `recording_states`; returns whether this is inside."""
    calls = recorded_calls()
    if calls is not None:
        calls.append(StateCall(mixer.layer_idx, id(mixer.module), **shape))
    return calls is not None


def _current_mixer(function: str, others: dict[str, Any], **given: Tensor | None) -> _Mixer:
    """The mixer that calls. Raises `ConfigError` if values are given that it cannot compute with."""
    mixer: _Mixer | None = getattr(_running, "mixer", None)
    assert mixer is not None, "these functions are the globals of a mixer's forward"
    strangers = [name for name, value in given.items() if value is not None]
    numbers = {name: value for name, value in others.items() if isinstance(value, Tensor | float | str)}
    strangers += sorted(numbers.keys() - _HARMLESS)
    if strangers:
        raise ConfigError(f"{mixer.name} passes {', '.join(strangers)} to {function}: not supported.")
    return mixer


def _cache_error(mixer: _Mixer) -> ConfigError:
    return ConfigError(
        f"{mixer.name} was given a cache, but an exact model computes whole sequences. Pass use_cache=False, or "
        "generate with the engine."
    )
