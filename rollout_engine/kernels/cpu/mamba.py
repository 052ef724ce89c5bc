"""Mirror of `mamba.h`: Mamba 2's recurrence of a decoder's layer, between its products."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu.arguments import address
from rollout_engine.kernels.cpu.convolution import ChannelRun
from rollout_engine.kernels.cpu.delta_net import GatedNorm


class MambaColumns(NamedTuple):
    """Places of the inputs of Mamba 2's recurrence among the outputs of the product of a layer's input."""

    runs: Sequence[tuple[int, int, int]]
    """(first channel, first column, number) of channels of x, B and C that are neighbours as columns too."""
    gates: int
    """Column of the gate of the first channel of x; the others follow."""
    steps: Sequence[int]
    """Column of dt of each head."""


class Mamba(NamedTuple):
    """Mamba 2's recurrence of one layer, with its states."""

    columns: MambaColumns
    conv_weight: Tensor
    """[C, W], C of all channels of x, B and C."""
    conv_bias: Tensor | None
    """[C]."""
    a_log: Tensor
    """[H]: decays are exp(-exp(a_log) s), s the step softplus(dt + dt_bias) within `limits`."""
    dt_bias: Tensor
    """[H]."""
    skip: Tensor
    """[H]: D, which multiplies the input of the recurrence; the product is added to its output."""
    limits: tuple[float, float]
    norm: GatedNorm
    norm_size: int
    """Channels that are normed together."""
    num_groups: int
    """Heads of B and C."""
    tails: Tensor
    """[S, W - 1, C]: inputs of the convolution before a position, by slot."""
    states: Tensor
    """float32 [S, H, K, V], by slot."""

    @property
    def attended(self) -> int:
        """Number of outputs."""
        return self.states.shape[1] * self.states.shape[3]


class MambaOperand:
    """A `Mamba` as C++ reads it: `address` is that of its struct. Raises `ValueError` if tensors do not fit.

    `num_columns`: those of all products of the layer's input.
    """

    def __init__(self, net: Mamba, dtype: torch.dtype, num_columns: int) -> None:
        num_slots, num_heads, key_size, value_size = net.states.shape
        num_channels, width = net.conv_weight.shape
        _check_sizes(net, num_columns)
        runs = (ChannelRun * len(net.columns.runs))(*(ChannelRun(*run) for run in net.columns.runs))
        steps = (c_int64 * num_heads)(*net.columns.steps)
        lowest, highest = torch.tensor(net.limits, dtype=dtype).tolist()  # rounded as `torch.clamp` rounds them
        bias, norm = net.conv_bias, net.norm
        self.num_slots, self._net, self._dtype, self._held = num_slots, net, dtype, (runs, steps)
        self._vectors: tuple[Tensor, ...] = ()
        self._call = _Mamba(
            *(ctypes.addressof(runs), ctypes.addressof(steps)),
            address("conv_weight", net.conv_weight, dtype, (num_channels, width)),
            None if bias is None else address("conv_bias", bias, dtype, (num_channels,)),
            address("tails", net.tails, dtype, (num_slots, width - 1, num_channels)),
            address("states", net.states, torch.float32, (num_slots, num_heads, key_size, value_size)),
            *(None, None, None, None),
            *(len(runs), net.columns.gates),
            *(num_channels, width, num_heads, net.num_groups, key_size, value_size, net.norm_size),
            *(lowest, highest, norm.epsilon, norm.is_gate_first, False, norm.is_rounded),
        )
        self.address = ctypes.addressof(self._call)
        self.read_vectors()

    def read_vectors(self) -> None:
        """Read the vectors of one element a head or channel from the live weights, before each step."""
        net, (_, num_heads, _, value_size) = self._net, self._net.states.shape
        rates = -net.a_log.detach().float().exp()  # as modules compute it
        biases, skips = net.dt_bias.detach().to(self._dtype).float(), net.skip.detach().float()
        weight = net.norm.weight.detach().float()
        for name, vector in (("rates", rates), ("biases", biases), ("skips", skips)):
            setattr(self._call, name, address(name, vector, torch.float32, (num_heads,)))
        self._call.norm_weight = address("norm", weight, torch.float32, (num_heads * value_size,))
        self._vectors = rates, biases, skips, weight


def _check_sizes(net: Mamba, num_columns: int) -> None:
    """Raise `ValueError` unless sizes and columns fit together."""
    (_, num_heads, key_size, value_size), num_channels = net.states.shape, len(net.conv_weight)
    size = num_heads * value_size
    if num_channels != 2 * net.num_groups * key_size + size or num_heads % net.num_groups or size % net.norm_size:
        raise ValueError(
            f"conv_weight should be of the channels of {net.num_groups} groups and {num_heads} heads of {key_size} and "
            f"{value_size}, normed by {net.norm_size}, and is {list(net.conv_weight.shape)}."
        )
    columns = net.columns
    covered = [channel for first, _, count in columns.runs for channel in range(first, first + count)]
    starts = [column for _, column, _ in columns.runs]
    ends = [columns.gates + size, *(column + count for _, column, count in columns.runs)]
    last = max(max(ends) - 1, *columns.steps)
    is_whole = sorted(covered) == list(range(num_channels)) and len(columns.steps) == num_heads
    if not is_whole or min(*starts, columns.gates, *columns.steps) < 0 or last >= num_columns:
        raise ValueError(
            f"columns should name those of {num_channels} channels and {num_heads} heads among {num_columns}, and are "
            f"{columns}."
        )


class _Mamba(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("runs", "steps", "conv_weight", "conv_bias", "tails", "states")),
        *((name, c_void_p) for name in ("rates", "biases", "skips", "norm_weight")),
        *((name, c_int64) for name in ("num_runs", "gates")),
        *((name, c_int32) for name in ("num_channels", "width", "num_heads", "num_groups", "key_size", "value_size")),
        ("norm_size", c_int32),
        *((name, c_float) for name in ("lowest", "highest", "norm_epsilon")),
        *((name, c_int32) for name in ("is_gate_first", "is_sigmoid", "is_rounded")),
    ]
