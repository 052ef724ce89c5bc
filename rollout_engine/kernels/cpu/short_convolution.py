"""Mirror of `short_convolution.h`: the short convolution of a decoder's layer, between its products."""

import ctypes
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu.arguments import address
from rollout_engine.kernels.cpu.convolution import ChannelRun


class ShortConvolution(NamedTuple):
    """C * convolution(B * x) of one layer, with the last inputs of the convolution."""

    values: int
    """Column of the first channel of B among the outputs of the layer's input product; the others follow."""
    inputs: int
    """Column of the first channel of x."""
    gates: int
    """Column of the first channel of C."""
    weight: Tensor
    """[C, W], C of all channels."""
    bias: Tensor | None
    """[C]."""
    tails: Tensor
    """[S, W - 1, C]: inputs of the convolution before a position, by slot."""

    @property
    def attended(self) -> int:
        """Number of outputs."""
        return len(self.weight)


class ShortConvolutionOperand:
    """A `ShortConvolution` as C++ reads it: `address` is that of its struct. Raises `ValueError` if tensors do not fit.

    `num_columns`: those of all products of the layer's input.
    """

    def __init__(self, net: ShortConvolution, dtype: torch.dtype, num_columns: int) -> None:
        (num_channels, width), self.num_slots = net.weight.shape, len(net.tails)
        columns = net.values, net.inputs, net.gates
        apart = sorted(columns)
        if (
            apart[0] < 0
            or apart[-1] + num_channels > num_columns
            or min(b - a for a, b in _pairs(apart)) < num_channels
        ):
            raise ValueError(
                f"values, inputs and gates should be three blocks of {num_channels} among {num_columns} columns, and "
                f"begin at {columns}."
            )
        self._call = _ShortConvolution(
            ChannelRun(0, net.values, num_channels),
            *(net.inputs, net.gates),
            address("weight", net.weight, dtype, (num_channels, width)),
            None if net.bias is None else address("bias", net.bias, dtype, (num_channels,)),
            address("tails", net.tails, dtype, (self.num_slots, width - 1, num_channels)),
            width,
        )
        self._net = net
        self.address = ctypes.addressof(self._call)

    def read_vectors(self) -> None:
        """Do nothing: its weight is read in place."""


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers, numbers[1:], strict=False))


class _ShortConvolution(ctypes.Structure):
    _fields_ = [
        ("run", ChannelRun),
        *((name, c_int64) for name in ("inputs", "gates")),
        *((name, c_void_p) for name in ("weight", "bias", "tails")),
        ("width", c_int64),
    ]
