"""Mirror of `delta_net.h`: the gated delta rule of a decoder's layer, between its products."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu.arguments import address
from rollout_engine.kernels.cpu.convolution import ChannelRun


class GatedNorm(NamedTuple):
    """round(weight * round(x / rms(x))) * silu(gate); with `is_rounded` False only the end is rounded.

    With `is_gate_first` x * silu(gate) stands in place of x, and nothing behind the norm.
    """

    weight: Tensor
    epsilon: float
    is_rounded: bool
    is_gate_first: bool = False


class DeltaColumns(NamedTuple):
    """Places of the inputs of the gated delta rule among the outputs of all products of a layer's input."""

    runs: Sequence[tuple[int, int, int]]
    """(first channel, first column, number) of channels of q, k and v that are neighbours as columns too."""
    gates: Sequence[int]
    """First column of the gate of each head."""
    betas: Sequence[int]
    """Column of b of each head."""
    decays: Sequence[int]
    """Column of a of each head."""

    def last(self, value_size: int) -> int:
        """The largest column, with gates of `value_size`."""
        ends = [column + count for _, column, count in self.runs]
        return max(*ends, *(first + value_size for first in self.gates), *self.betas, *self.decays) - 1


class DeltaNet(NamedTuple):
    """The gated delta rule of one layer, with its states."""

    columns: DeltaColumns
    conv_weight: Tensor
    """[C, W], C of all channels of q, k and v."""
    conv_bias: Tensor | None
    """[C]."""
    a_log: Tensor
    """[H]: decays are exp(-exp(a_log) softplus(a + dt_bias))."""
    dt_bias: Tensor
    """[H]."""
    norm: GatedNorm
    num_groups: int
    """Heads of q and k."""
    key_epsilon: float
    """Added to the squared lengths of q and k, by which they are divided."""
    beta_factor: float
    """Multiplies sigmoid(b)."""
    tails: Tensor
    """[S, W - 1, C]: inputs of the convolution before a position, by slot."""
    states: Tensor
    """float32 [S, H, K, V], by slot."""

    @property
    def attended(self) -> int:
        """Number of outputs."""
        return self.states.shape[1] * self.states.shape[3]


class DeltaOperand:
    """A `DeltaNet` as C++ reads it: `address` is that of its struct. Raises `ValueError` if tensors do not fit.

    `num_columns`: those of all products of the layer's input.
    """

    def __init__(self, net: DeltaNet, dtype: torch.dtype, num_columns: int) -> None:
        num_slots, num_heads, key_size, value_size = net.states.shape
        num_channels, width = net.conv_weight.shape
        if num_channels != 2 * net.num_groups * key_size + num_heads * value_size or num_heads % net.num_groups:
            raise ValueError(
                f"conv_weight should be of the channels of {net.num_groups} groups and {num_heads} heads of "
                f"{key_size} and {value_size}, and is {list(net.conv_weight.shape)}."
            )
        self._check_columns(net.columns, num_heads, num_channels, value_size, num_columns)
        self.num_slots = num_slots
        columns = net.columns
        runs = (ChannelRun * len(columns.runs))(*(ChannelRun(*run) for run in columns.runs))
        numbers = [(c_int64 * num_heads)(*each) for each in (columns.gates, columns.betas, columns.decays)]
        bias, norm = net.conv_bias, net.norm
        self._net, self._held = net, (runs, numbers)
        self._vectors: tuple[Tensor, ...] = ()
        self._call = _DeltaNet(
            ctypes.addressof(runs),
            *(ctypes.addressof(each) for each in numbers),
            address("conv_weight", net.conv_weight, dtype, (num_channels, width)),
            None if bias is None else address("conv_bias", bias, dtype, (num_channels,)),
            address("tails", net.tails, dtype, (num_slots, width - 1, num_channels)),
            address("states", net.states, torch.float32, (num_slots, num_heads, key_size, value_size)),
            *(None, None, None, len(runs)),
            *(num_channels, width, num_heads, net.num_groups, key_size, value_size),
            *(key_size**-0.5, net.key_epsilon, norm.epsilon, net.beta_factor, False, False, norm.is_rounded),
        )
        self.address = ctypes.addressof(self._call)
        self.read_vectors()

    def read_vectors(self) -> None:
        """Read the vectors of one element a head or channel from the live weights, before each step."""
        net, (_, num_heads, _, value_size) = self._net, self._net.states.shape
        rates = -net.a_log.detach().float().exp()  # as modules compute it
        biases, weight = net.dt_bias.detach().float(), net.norm.weight.detach().float()
        self._call.rates = address("a_log", rates, torch.float32, (num_heads,))
        self._call.biases = address("dt_bias", biases, torch.float32, (num_heads,))
        self._call.norm_weight = address("norm", weight, torch.float32, (value_size,))
        self._vectors = rates, biases, weight

    @staticmethod
    def _check_columns(
        columns: DeltaColumns, num_heads: int, num_channels: int, value_size: int, num_columns: int
    ) -> None:
        by_head = columns.gates, columns.betas, columns.decays
        covered = [channel for first, _, count in columns.runs for channel in range(first, first + count)]
        starts = [column for _, column, _ in columns.runs]
        if (
            sorted(covered) != list(range(num_channels))
            or any(len(each) != num_heads for each in by_head)
            or min(*starts, *(min(each) for each in by_head)) < 0
            or columns.last(value_size) >= num_columns
        ):
            raise ValueError(
                f"columns should name those of {num_channels} channels and {num_heads} heads among {num_columns}, and "
                f"are {columns}."
            )


class _DeltaNet(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("runs", "gates", "betas", "decays", "conv_weight", "conv_bias")),
        *((name, c_void_p) for name in ("tails", "states", "rates", "biases", "norm_weight")),
        ("num_runs", c_int64),
        *((name, c_int32) for name in ("num_channels", "width", "num_heads", "num_groups", "key_size", "value_size")),
        *((name, c_float) for name in ("scale", "key_epsilon", "norm_epsilon", "beta_factor")),
        *((name, c_int32) for name in ("is_gate_first", "is_sigmoid", "is_rounded")),
    ]
