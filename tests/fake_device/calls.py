"""torch's functions say of the fake device's memory that it is CUDA's. Transfers and host accesses start here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_SCALARS = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)


class Calls(TorchFunctionMode):
    """Takes every call of torch's functions while it is on."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._handlers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda tensor: CUDA if device.has(tensor) else tensor.device,
            Tensor.is_cuda.__get__: device.has,
            Tensor.is_cpu.__get__: lambda tensor: tensor.is_cpu and not device.has(tensor),
            Tensor.get_device: lambda tensor: 0 if device.has(tensor) else tensor.get_device(),
            Tensor.is_pinned: lambda tensor, *_: device.is_pinned(tensor),
            Tensor.untyped_storage: device.storage_of,
            Tensor.to: self._to,
            Tensor.cpu: lambda tensor, **_: self._to(tensor, _HOST),
            Tensor.cuda: lambda tensor, *_, **options: self._to(tensor, CUDA, **options),
            Tensor.pin_memory: device.pinned_copy,
            Tensor.numpy: self._numpy,
            Tensor.__array__: lambda tensor, *args: np.asarray(self._numpy(tensor), *args),
            Tensor.tolist: self._tolist,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in _SCALARS and self._device.is_pinned(args[0]):
            self._device.host_reads(args[0], func.__name__)
        asked, pinned = kwargs.get("device"), kwargs.get("pin_memory")
        if pinned or (asked is not None and torch.device(asked).type == "cuda"):
            return self._make(func, args, kwargs, pinned=bool(pinned))
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: Any, *, pinned: bool) -> Tensor:
        """A factory's tensor, on the device or in pinned memory."""
        device, name = self._device, func.__name__
        with device.plainly():
            made = func(*args, **{**kwargs, "device": _HOST} | ({"pin_memory": False} if pinned else {}))
            is_empty = name.startswith(("empty", "new_empty"))
            if pinned:
                return device.pinned_as(made) if is_empty else device.pinned_copy(made)
            if is_empty:
                return device.empty_as(made)
            if name in ("tensor", "as_tensor", "new_tensor"):
                device.waits(f"torch.{name}(..., device=...)", kind="unpinned copy")
            return device.filled(made)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = self._device
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            args, kwargs = (CUDA if device.has(other) else _HOST, other.dtype, *args[1:]), {}
        where, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and dtype != tensor.dtype:
            tensor = tensor.to(dtype)
        if where is None or where.type == ("cuda" if device.has(tensor) else _HOST.type) or where.type == "meta":
            return tensor.to(*args, **kwargs) if where is not None and where.type == "meta" else tensor
        with device.plainly():
            into = device.empty_as if where.type == "cuda" else device.pinned_as if non_blocking else torch.empty_like
            made: Tensor = into(tensor)
            device.copy(made, tensor, non_blocking)
        return made

    def _numpy(self, tensor: Tensor, **options: Any) -> np.ndarray:
        if self._device.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self._device.numpy(tensor, **options)

    def _tolist(self, tensor: Tensor) -> Any:
        device = self._device
        if device.has(tensor):
            return self._to(tensor, _HOST).tolist()
        if device.is_pinned(tensor):
            device.host_reads(tensor, "tolist")
        with device.plainly():
            return tensor.tolist()
