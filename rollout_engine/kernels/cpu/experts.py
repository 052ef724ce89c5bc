"""ctypes wrapper of `experts.cpp`. Callers check `supports`."""

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.rows import supports

__all__ = ["scores", "supports"]

_SMALL = 1 << 14
"""Logits that one thread turns into scores sooner than others wake up."""


def scores(logits: Tensor, *, is_sigmoid: bool) -> Tensor:
    """Sigmoid, or softmax, of each row of logits [T, E], float32."""
    logits = logits.contiguous()
    out = torch.empty_like(logits, dtype=torch.float32)
    library = build.declared(experts_scores=(None, c_void_p, c_void_p, *[c_int64] * 5))
    threads = 1 if logits.numel() < _SMALL else torch.get_num_threads()
    is_bf16 = logits.dtype is torch.bfloat16
    library.experts_scores(logits.data_ptr(), out.data_ptr(), *logits.shape, is_bf16, is_sigmoid, threads)
    return out
