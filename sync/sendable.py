"""Checks that a value of a source is a plain tensor with data on this rank."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sync.errors import ManifestMismatch
from sync.lazy_tensor import LazyTensor, is_sharded


def check_sendable(name: object, tensor: object) -> None:
    """Raise `ManifestMismatch`, naming it, for anything that is not a plain tensor with data."""
    if not isinstance(name, str):
        raise ManifestMismatch(f"A weight is named {name!r}: names are strings.")
    if isinstance(tensor, LazyTensor):
        return
    if not isinstance(tensor, Tensor):
        raise ManifestMismatch(f"'{name}' is {type(tensor).__name__}, not a tensor.{_inner_dict(name, tensor)}")
    if tensor.is_meta:
        what = f"'{name}' is on the meta device: it has no values to send"
        raise ManifestMismatch(f"{what}. If Accelerate has offloaded the model, load it without device_map.")
    if hasattr(tensor, "ds_shape") and tensor.numel() == 0:
        what = f"'{name}' is partitioned by DeepSpeed ZeRO-3: this rank has none of its values"
        how = "On every rank enter deepspeed.zero.GatheredParameters(model.parameters()), and send there"
        raise ManifestMismatch(f"{what}. {how}.")
    _check_plain(name, tensor)


def _check_plain(name: str, tensor: Tensor) -> None:
    """Raise `ManifestMismatch` for tensors whose values are not those of their dtype and shape."""
    kind = type(tensor).__name__
    if kind in ("Params4bit", "Int8Params"):
        what = f"'{name}' is quantised by bitsandbytes ({kind}), which engines do not read"
        raise ManifestMismatch(
            f"{what}: dequantise the model first (model.dequantize()); train adapters on a base that is not quantised."
        )
    if hasattr(tensor, "local_shards"):
        what = f"'{name}' is a ShardedTensor, of which this rank holds a part"
        raise ManifestMismatch(f"{what}: pass the model itself, or its full state dict.")
    if tensor.is_quantized or (is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)):
        what = f"'{name}' is a {kind} of dtype {tensor.dtype}, which does not hold its values as a plain tensor does"
        raise ManifestMismatch(f"{what}: send a model, or a dict, of plain tensors (dequantised, if it is quantised).")
    if tensor.layout != torch.strided:
        raise ManifestMismatch(f"'{name}' has layout {tensor.layout}: only dense tensors travel.")


def _inner_dict(name: str, value: object) -> str:
    if not isinstance(value, dict):
        return ""
    if name == "state":
        return " This looks like the state of an optimizer: pass the model, or its state dict."
    return " Pass the inner dict."
