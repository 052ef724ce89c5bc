"""Batch-invariant GEMM in C++ (`gemm.cpp`): each row is accumulated over K in one order, whatever the other rows."""

import ctypes
import math
from collections.abc import Iterable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import DTYPES, address, argument_error, check_floats, check_ids, is_integral

PANEL = 32
"""Output features that are interleaved in a packed weight."""
COPY, UNPACK, PACK = range(3)
"""Modes of `move_panels`."""
_UNIT_BLOCK = 16


class PackedWeight(NamedTuple):
    """A weight [out_features, in_features] in the kernel's layout."""

    panels: Tensor
    """int32 [out_features / 32 rounded up, 32-bit units of a row rounded up to 16, 32]; with `scales`, int8 codes: a
    byte for each element of these units, in the same order."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    """The dtype of the weight that was packed, and of the inputs that it multiplies."""
    scales: Tensor | None = None
    """float32 [out_features rounded up to 32]: weights are code * scale (`kernels.cpu.int8`); None: as given."""

    @classmethod
    def like(cls, weight: Tensor, panels: Tensor) -> "PackedWeight":
        """Panels of a weight with the shape [N, K] and dtype of `weight`."""
        out_features, in_features = weight.shape
        return cls(panels, out_features, in_features, weight.dtype)


class _Call(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("staging", c_void_p),
        ("rows", c_int64),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("is_bf16", c_int32),
        ("num_threads", c_int32),
        ("float32_out", c_int32),
        ("adapters", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("scales", c_void_p),
    ]


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel computes this dtype on this machine."""
    return dtype in DTYPES and build.load_kernels() is not None


def is_fast(dtype: torch.dtype) -> bool:
    """Whether it uses AVX2, AVX-512 or AMX here; without them oneDNN is faster."""
    return level(dtype) > 0


def level(dtype: torch.dtype) -> int:
    """Instructions that the kernel uses here: 1 AVX2, 2 AVX-512, 3 AVX-512 BF16, 4 AMX; 0: none, or no kernel."""
    return int(_library().gemm_level(dtype == torch.bfloat16)) if supports(dtype) else 0


def empty_panels(weights: Sequence[Tensor]) -> list[Tensor]:
    """Memory for packed copies of `weights`, in one allocation, on huge pages if the system grants them.

    Only the shapes and dtypes of `weights` matter.
    """
    sizes = [panels_like(weight) for weight in weights]
    lengths = [math.prod(size) for size in sizes]
    memory = torch.empty(sum(lengths), dtype=torch.int32)
    _library().gemm_ask_for_large_pages(memory.data_ptr(), memory.nbytes)
    return [part.view(size) for part, size in zip(memory.split(lengths), sizes, strict=True)]


def panels_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Shape of the panels of a weight [out_features, in_features]."""
    units = -(-in_features // 2) if dtype == torch.bfloat16 else in_features
    return -(-out_features // PANEL), -(-units // _UNIT_BLOCK) * _UNIT_BLOCK, PANEL


def panels_like(weight: Tensor) -> tuple[int, int, int]:
    """Shape of the panels of a weight with the shape [N, K] and dtype of `weight`."""
    out_features, in_features = weight.shape
    return panels_shape(out_features, in_features, weight.dtype)


def codes_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Shape of the int8 codes of a weight: panels, 32-bit units of a row of it, elements of a unit of 32 columns."""
    panels, units, columns = panels_shape(out_features, in_features, dtype)
    return panels, units, columns * (4 // dtype.itemsize)


def addresses(name: str, weight: PackedWeight) -> tuple[int, int | None]:
    """Addresses of the panels and scales. Raises `ValueError` if they are not those of such a weight."""
    shape = panels_shape(weight.out_features, weight.in_features, weight.dtype)
    if weight.scales is None:
        return address(f"the panels of {name}", weight.panels, torch.int32, shape), None
    of_codes = codes_shape(weight.out_features, weight.in_features, weight.dtype)
    codes = address(f"the codes of {name}", weight.panels, torch.int8, of_codes)
    return codes, address(f"the scales of {name}", weight.scales, torch.float32, (shape[0] * PANEL,))


def pack(weight: Tensor, panels: Tensor | None = None) -> PackedWeight:
    """Pack `weight` [N, K], float32 or bfloat16, into the kernel's layout, of the same size up to padding.

    `panels`: memory from `empty_panels` to pack into; None allocates it. Raises `ValueError` for unreadable tensors.
    """
    check_floats("weight", weight, num_dims=2)
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    if panels is None:
        (panels,) = empty_panels([weight])
    is_bf16 = weight.dtype == torch.bfloat16
    place = address("panels", panels, torch.int32, panels_like(weight))
    _library().gemm_pack(weight.data_ptr(), out_features, in_features, is_bf16, place, torch.get_num_threads())
    return PackedWeight(panels, out_features, in_features, weight.dtype)


def pack_in_place(panels: Tensor, like: Tensor) -> PackedWeight:
    """Pack a weight with the shape [N, K] and dtype of `like` that is stored in `rows_of(panels, like.dtype)[:N, :K]`.

    Raises `ValueError` for unreadable tensors.
    """
    if like.dim() != 2:
        raise argument_error("like", like, "float32 or bfloat16 [N, K]")
    packed = PackedWeight.like(like, panels)
    move_panels(PACK, [(packed, panels)])
    return packed


def move_panels(move: int, runs: Iterable[tuple[PackedWeight, Tensor]]) -> None:
    """COPY or UNPACK panels of weights [N, K] to other panels, or PACK `rows_of` them, several at once.

    Each run has its destination, which for PACK may be the panels themselves. Raises `ValueError` for unreadable
    tensors.
    """
    flat: list[int] = []
    for (panels, out_features, in_features, dtype, _), out in runs:
        if dtype not in DTYPES:
            raise ValueError(f"Weights should be float32 or bfloat16, and one is {dtype}.")
        shape = panels_shape(out_features, in_features, dtype)
        places = [address(name, part, torch.int32, shape) for name, part in (("panels", panels), ("out", out))]
        flat += [*places, out_features, in_features, dtype == torch.bfloat16]
    array = (c_int64 * len(flat))(*flat)
    _library().gemm_move_panels(array, len(flat) // 5, move, torch.get_num_threads())


def rows_of(panels: Tensor, dtype: torch.dtype) -> Tensor:
    """View of panels as rows of `dtype` [N rounded up to 32, K rounded up to 64 bytes], 32 rows per panel."""
    return panels.view(-1, panels.shape[1]).view(dtype)


def unpack(packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """The weight [N, K] that was packed, bit for bit, as a view of `out`: other panels, allocated if None."""
    if out is None:
        out = torch.empty_like(packed.panels)
    move_panels(UNPACK, [(packed, out)])
    return rows_of(out, packed.dtype)[: packed.out_features, : packed.in_features]


def select_rows(packed: PackedWeight, indices: Tensor) -> Tensor:
    """Rows `indices`, integers [...], of the weight -> [..., K]. Raises `ValueError` for an index out of range."""
    if not is_integral(indices) or not indices.is_cpu:
        raise argument_error("indices", indices, "a tensor of integers on the CPU")
    indices = indices.long()
    check_ids("indices", indices, packed.out_features, of="rows of the weight")
    units = packed.panels[indices // PANEL, :, indices % PANEL]
    return units.contiguous().view(packed.dtype)[..., : packed.in_features]


def matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None, *, float32_out: bool = False) -> Tensor:
    """x [R, K] @ weight.T + bias [N] -> [R, N] in `x.dtype`, accumulated in float32 and rounded once.

    `float32_out` returns the float32 sums unrounded. Raises `ValueError` for unreadable tensors.
    """
    check_floats("x", x, num_dims=2)
    x = x.contiguous()
    rows, in_features = x.shape
    if in_features != weight.in_features or x.dtype is not weight.dtype:
        raise argument_error("x", x, f"{weight.dtype} [R, {weight.in_features}] like the weight")
    panels, scales = addresses("weight", weight)
    out = torch.empty(rows, weight.out_features, dtype=torch.float32 if float32_out else x.dtype)
    is_bf16 = x.dtype == torch.bfloat16
    call = _Call(
        x.data_ptr(),
        panels,
        None if bias is None else address("bias", bias, x.dtype, (weight.out_features,)),
        out.data_ptr(),
        None,
        rows,
        in_features,
        weight.out_features,
        is_bf16,
        torch.get_num_threads(),
        float32_out,
        None,
        in_features,
        weight.out_features,
        scales,
    )
    staging = torch.empty(_library().gemm_staging(ctypes.addressof(call)), dtype=torch.uint8)
    call.staging = staging.data_ptr()
    _library().gemm_run(ctypes.addressof(call))
    return out


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        gemm_level=(c_int32, c_int32),
        gemm_pack=(None, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
        gemm_move_panels=(None, c_void_p, c_int64, c_int32, c_int32),
        gemm_ask_for_large_pages=(None, c_void_p, c_int64),
        gemm_staging=(c_int64, c_void_p),
        gemm_run=(None, c_void_p),
    )
