"""Weights rounded to int8 codes in C++ (`int8.cpp`), with a float32 scale for each output, for `gemm.matmul`.

    largest = max |row|      scale = largest / 127      code = round(value * (127 / largest)), ties to even

A code times its scale is within half a scale of its value, up to float32 rounding. A row whose largest value is below
1.5e-36 is all zeros: its scale would be subnormal. A row with a value that is NaN or infinite has scale NaN, and so
have all its products.
"""

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build, gemm
from rollout_engine.kernels.cpu.arguments import check_floats


def pack(weight: Tensor) -> gemm.PackedWeight:
    """Round `weight` [N, K] to codes for `gemm.matmul`: a quarter of the bytes of float32, half of those of bfloat16.

    Raises `ValueError` for unreadable tensors.
    """
    check_floats("weight", weight, num_dims=2)
    out_features, in_features = weight.shape
    codes = torch.zeros(gemm.codes_shape(out_features, in_features, weight.dtype), dtype=torch.int8)
    scales = torch.zeros(len(codes) * gemm.PANEL)
    weight = weight.contiguous()
    _library().int8_pack(
        weight.data_ptr(),
        out_features,
        in_features,
        weight.dtype == torch.bfloat16,
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return gemm.PackedWeight(codes, out_features, in_features, weight.dtype, scales)


@cache
def _library() -> ctypes.CDLL:
    return build.declared(int8_pack=(None, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int32))
