"""Operators of torch on memory of the fake device: queued, with what they read and write."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from tests.fake_device.memory import Block, View, bytes_of
from tests.fake_device.streams import Operation

aten = torch.ops.aten
_FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MOVES = {"clone", "cat", "stack"}
"""They may move what nobody has written, and it stays unwritten."""
_PICKS = {"index", "index_select", "gather", "embedding"}
"""They read some elements of their first tensor, as their other arguments say."""
_PUTS = {"index_put_", "_index_put_impl_"}
_WHOLE = {"one_hot"}
"""Operators that are queued whole: their parts would make tensors on the host."""
_NEEDS_VALUES = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
_NEEDS_VALUES |= {"unique_consecutive", "repeat_interleave", "nonzero_numpy", "argwhere"}
"""The host needs values for their results or shapes."""


class Operators(TorchDispatchMode):
    """Queues operators that touch the device's memory on the current stream; others run at once."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._device
        with device.plainly():
            tensors = _tensors_in((args, kwargs))
            blocks = [device.memory.block_of(each) for each in tensors]
        if not any(blocks) or func.overloadpacket is aten.set_:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ not in _WHOLE and "CompositeImplicitAutograd" in _kernels_of(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if _is_view(func):
            return func(*args, **kwargs)
        with device.lock, device.plainly():
            is_there = any(block is not None and not block.is_pinned for block in blocks)
            name = func.overloadpacket.__name__
            if name == "copy_":
                return device.copy(*args, **kwargs)
            if not is_there:
                return _on_host(device, func, args, kwargs)
            return _launched(device, func, args, kwargs, list(zip(tensors, blocks, strict=True)))


def _tensors_in(value: Any) -> list[Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


def _kernels_of(func: Any) -> list[str]:
    key = "CompositeImplicitAutograd"
    return [key] if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) else []


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operator writes, in the order of its arguments."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            found += _tensors_in(value)
    return found


def _on_host(device: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The host works on pinned memory, now."""
    written = _written(func, args, kwargs)
    for tensor in _tensors_in((args, kwargs)):
        if not any(tensor is each for each in written):
            device.host_reads(tensor, func.overloadpacket.__name__)
    result = func(*args, **kwargs)
    for tensor in written:
        device.host_writes(tensor, func.overloadpacket.__name__)
    return result


def _launched(device: Any, func: Any, args: Any, kwargs: Any, given: list[tuple[Tensor, Block | None]]) -> Any:
    name = func.overloadpacket.__name__
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}
    for tensor, block in given:
        if block is None and tensor.dim():
            if name not in _PICKS | _PUTS:
                raise RuntimeError(f"{func}: expected all tensors to be on the device, found one on the host")
            device.waits(f"{name} with an index of the host's", kind="unpinned copy")
    views = {id(tensor): View.of(tensor, block) for tensor, block in given if block}

    def raw(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: views.get(id(tensor)) or tensor.clone(), value)

    written = _written(func, args, kwargs)
    raw_args, raw_kwargs = raw(args), raw(kwargs)
    reads = [views[id(t)] for t, b in given if b and not any(t is each for each in written)]
    if _reads_what_it_writes(func, name):
        reads += [views[id(each)] for each in written if id(each) in views]
    writes = [views[id(each)] for each in written]
    operator = _Operator(device, func, name, raw_args, raw_kwargs, reads, writes)
    if name in _NEEDS_VALUES or _has_mask(name, args):
        return _awaited(device, operator, name, written)
    if written:
        device.launch(name, operator.run)
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
    if func._schema.returns and not _returns_tensors(func):
        raise TypeError(f"{func} is not known to the fake device")
    made = tree_map_only(Tensor, device.empty_as, _forms(func, raw_args, raw_kwargs))
    if name not in _FACTORIES:
        operator.outs = [device.view(each) for each in _tensors_in(made)]
        device.launch(name, operator.run)
    return made


def _awaited(device: Any, operator: "_Operator", name: str, written: list[Tensor]) -> Any:
    """The result depends on values: the host waits for it."""
    kinds = {"_local_scalar_dense": "scalar read", "nonzero": "nonzero"}
    device.launch(name, operator.run)
    device.waits(name, kind=kinds.get(name, "boolean mask" if name in _PICKS | _PUTS else "values decide a shape"))
    if written:
        return written[0]
    return tree_map_only(Tensor, device.filled, operator.result)


def _has_mask(name: str, args: Any) -> bool:
    """Whether a tensor of booleans picks elements."""
    picks = tree_flatten(args[1])[0] if name in {"index", *_PUTS} else []
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in picks)


def _reads_what_it_writes(func: Any, name: str) -> bool:
    return name.endswith("_") and name not in {"fill_", "zero_", "copy_", "set_", "normal_", "uniform_"} | _PUTS


def _returns_tensors(func: Any) -> bool:
    return all("Tensor" in str(each.type) for each in func._schema.returns)


def _forms(func: Any, args: Any, kwargs: Any) -> Any:
    """Shapes, strides and dtypes of the results: tensors on meta."""

    def form(view: View) -> Tensor:
        return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")

    def on_meta(value: Any) -> Any:
        return tree_map_only(Tensor, lambda each: each.to("meta") if each.dim() else each, _with(form, value))

    return func(*on_meta(args), **on_meta(kwargs))


class _Operator:
    """One queued call. It holds no tensor of the device, whose memory must be freed when its own tensors end."""

    def __init__(
        self, device: Any, func: Any, name: str, args: Any, kwargs: Any, reads: list[View], writes: list[View]
    ) -> None:
        self._device, self._func, self._name, self._args, self._kwargs = device, func, name, args, kwargs
        self._reads, self._writes = reads, writes
        self.outs: list[View] = []
        self.result: Any = None

    def run(self, operation: Operation) -> None:
        accesses, func = self._device.accesses, self._func
        for view in (*self._reads, *self._writes):
            accesses.check_live(operation, view)
        args, kwargs = _with(View.tensor, self._args), _with(View.tensor, self._kwargs)
        for place, view in enumerate(self._reads):
            accesses.read(operation, view.block, self._part(view, place, args), must_be_set=self._name not in _MOVES)
        self.result = func(*args, **kwargs)
        places = [(view, self._put(view, args)) for view in self._writes] + [(view, view.where()) for view in self.outs]
        results = _tensors_in(self.result) if self.outs else []
        for out, value in zip(self.outs, results, strict=True):
            out.tensor().copy_(value)
        for view, where in places:
            accesses.write(operation, view.block, where)
        if self._name in _MOVES and self.outs:
            _move_set(self._func, self._args, self._kwargs, self.outs[0])

    def _part(self, view: View, place: int, args: Any) -> "slice | np.ndarray":
        """The bytes that are read of a tensor: all, or those of the elements that indices pick."""
        if self._name in _PICKS and place == 0 and self._args[0] is view:
            return bytes_of(self._func(view.elements(), *args[1:]), view.dtype.itemsize)
        return view.where()

    def _put(self, view: View, args: Any) -> "slice | np.ndarray":
        if self._name in _PUTS:
            return bytes_of(aten.index(view.elements(), args[1]), view.dtype.itemsize)
        return view.where()


def copy_set(source: View, target: View) -> None:
    """What had not been written in the source is not in its copy."""
    if source.dtype == target.dtype and source.shape == target.shape:
        target.block.is_set[target.where()] = source.block.is_set[source.where()]


def _move_set(func: Any, args: Any, kwargs: Any, out: View) -> None:
    """The same for an operator that moves elements: it moves what is known of them as well."""

    def is_set(view: View) -> Tensor:
        whole = torch.from_numpy(view.block.is_set[view.where()]).view(-1, view.dtype.itemsize).all(1)
        return whole.view(view.shape)

    moved = func(*_with(is_set, args), **_with(is_set, kwargs))
    out.block.is_set[out.where()] = np.repeat(moved.reshape(-1).numpy(), out.dtype.itemsize)


def _with(change: Callable[[View], Any], value: Any) -> Any:
    """Arguments with each `View` changed."""
    is_view = lambda each: isinstance(each, View)  # noqa: E731
    return tree_map(lambda each: change(each) if is_view(each) else each, value, is_leaf=is_view)
