"""Weights of every dtype, with random bits, which change a little from version to version."""

import numpy as np
import torch

from sync.digests import tensor_bytes

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
)
_LIKE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(random, shape, dtype):
    """A tensor of any bits: NaN payloads, infinities and -0.0 among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    memory = torch.frombuffer(bytearray(random.bytes(count) or b"\0"), dtype=torch.uint8)[:count]
    return memory.view(dtype).view(shape)


def make_weights(random):
    """Tensors of every dtype, of any size, empty and tied ones too."""
    weights = {
        f"layer.{i}": random_bits(random, (int(random.integers(10, 50)), int(random.integers(20, 60))), dtype)
        for i, dtype in enumerate(DTYPES)
    }
    weights["mask"] = torch.from_numpy(random.random(70) < 0.5)
    weights["scalar"] = random_bits(random, (), torch.bfloat16)
    weights["empty"] = torch.empty(0, 4)
    weights["tied"] = weights["layer.0"]
    return weights


def change_some(random, weights, share):
    """New tensors, in which about `share` of the elements have other bits; ties stay."""
    changed = {}
    for name, tensor in weights.items():
        if name == "tied":
            continue
        flat = tensor.clone().view(-1)
        places = torch.from_numpy(np.flatnonzero(random.random(flat.numel()) < share))
        if len(places) and tensor.dtype == torch.bool:
            flat[places] = ~flat[places]
        elif len(places):
            like = _LIKE[tensor.itemsize]
            flat.view(like)[places] = random_bits(random, (len(places),), tensor.dtype).view(like)
        changed[name] = flat.view(tensor.shape)
    if "tied" in weights:
        changed["tied"] = changed["layer.0"]
    return changed


def bytes_of(tensors):
    """Name -> dtype, shape and bits."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor_bytes(tensor.contiguous())))
        for name, tensor in tensors.items()
    }
