"""Routed experts in answers: as clients of `/inference/v1/generate` read them, and as SGLang's do."""

import base64
from typing import Any

import numpy as np


def as_fields(routed_experts: np.ndarray | None, start: int = 0) -> dict[str, Any] | None:
    """`data`: base64 of the array's bytes, row by row; `shape` and `dtype` of it, and the token that row 0 is of."""
    if routed_experts is None:
        return None
    data = base64.b64encode(routed_experts.tobytes()).decode("ascii")
    shape, dtype = list(routed_experts.shape), routed_experts.dtype.name
    return {"data": data, "shape": shape, "start": start, "dtype": dtype}


def as_int32(routed_experts: np.ndarray) -> str:
    """Base64 of the same as int32, little-endian, without a shape: most of SGLang's clients know it."""
    return base64.b64encode(routed_experts.astype("<i4").tobytes()).decode("ascii")
