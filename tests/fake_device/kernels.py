"""Triton's kernels on the fake device: queued, then run by Triton's interpreter, which tells of loads and stores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from triton.runtime import interpreter

from tests.fake_device.memory import Block, View
from tests.fake_device.streams import Operation

_MOST_ACCESSES = 5_000
"""Loads and stores of one launch."""


class Trace:
    """What one launch loads and stores."""

    def __init__(self, device: Any, operation: Operation) -> None:
        self._device, self._operation = device, operation
        self._touched: dict[bool, dict[Block, np.ndarray]] = {False: {}, True: {}}
        """By whether it writes, and block: which bytes."""
        self._count = 0

    def access(self, addresses: np.ndarray, mask: np.ndarray, size: int, *, writes: bool) -> np.ndarray:
        """Elements of `size` bytes at those `addresses` where `mask`. Returns those of `mask` that may be touched: the
        others lie in memory of this process, or in what others have on the device now."""
        self._count += 1
        if self._count > _MOST_ACCESSES:
            raise RuntimeError(f"{self._operation} does not end: it may count by a number that is not one")
        asked, safe = np.broadcast_to(mask, addresses.shape), np.zeros(addresses.shape, np.bool_)
        if not asked.any():
            return safe
        starts = self._device.memory.starts
        owners = np.searchsorted(starts, addresses, "right") - 1
        for owner in np.unique(owners[asked]):
            block = self._device.memory.blocks[int(starts[owner])] if owner >= 0 else None
            chosen = asked & (owners == owner)
            if block is not None:
                places = (addresses - np.uint64(block.address)).astype(np.int64)
                safe |= self._touch(block, places, chosen, size, writes=writes)
            elif chosen.any():
                self._report("outside", "touches memory that was never the device's")
        return safe

    def _touch(self, block: Block, places: np.ndarray, chosen: np.ndarray, size: int, *, writes: bool) -> np.ndarray:
        """Elements at `places` of a block where `chosen`; returns those that are in what was allocated."""
        life = block.life_at(self._operation.tick) or block.lives[-1]
        limit = block.capacity if block.is_of_graphs else life.num_bytes
        safe = chosen & (places + size <= limit)
        if not block.is_of_graphs and block.life_at(self._operation.tick) is None:
            self._report("stale", "has the address of memory that had been freed")
            return np.zeros_like(safe)
        if (safe != chosen).any():
            self._report("outside", f"touches bytes behind the {limit} of a tensor")
        if block not in self._touched[writes]:
            self._touched[writes][block] = np.zeros(block.capacity, np.bool_)
        if not writes and not block.is_set[places[safe]].all():
            self._report("uninitialised", "reads bytes that nobody has written")
            safe[safe] = block.is_set[places[safe]]  # it finds zeros, so that it does not count to a random number
        inside = places[safe]
        for byte in range(size):
            self._touched[writes][block][inside + byte] = True
            if writes:
                block.is_set[inside + byte] = True
        return safe

    def finish(self) -> None:
        """Compare all with earlier accesses."""
        accesses = self._device.accesses
        for block, touched in self._touched[False].items():
            accesses.read(self._operation, block, touched, must_be_set=False)
        for block, touched in self._touched[True].items():
            accesses.write(self._operation, block, touched)

    def _report(self, kind: str, text: str) -> None:
        self._device.accesses.report(kind, f"{self._operation} {text}")


@contextmanager
def queued_kernels(device: Any, patch: Any) -> Iterator[None]:
    """Kernels launched inside run when the fake device runs them."""
    run, current = interpreter.GridExecutor.__call__, list[Trace]()

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        with device.lock, device.plainly():
            blocks = [device.memory.block_of(each) for each in tree_flatten((args, kwargs))[0] if _is_tensor(each)]
            if not any(blocks):
                run(executor, *args, **kwargs)
                return
            views = tree_map_only(Tensor, lambda t: View.of(t, device.memory.block_of(t)), (args, kwargs))
            device.launch(executor.fn.__name__, partial(execute, executor, views))

    def execute(executor: Any, views: Any, operation: Operation) -> None:
        for view in tree_flatten(views, is_leaf=_is_view)[0]:
            if _is_view(view):
                device.accesses.check_live(operation, view)
        args, kwargs = tree_map(lambda each: each.tensor() if _is_view(each) else each, views, is_leaf=_is_view)
        current.append(Trace(device, operation))
        try:
            with np.errstate(all="ignore"):  # a device computes with NaN and infinities as kernels mean it
                run(executor, *args, **kwargs)
        finally:
            current.pop().finish()

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name, place_of_mask, writes in (
        ("create_masked_load", 1, False),
        ("create_masked_store", 2, True),
        ("create_atomic_rmw", 3, True),
    ):
        patch.setattr(interpreter.InterpreterBuilder, name, _traced(name, place_of_mask, writes, current))
    yield


def _traced(name: str, place_of_mask: int, writes: bool, current: list[Trace]) -> Callable[..., Any]:
    function, place = getattr(interpreter.InterpreterBuilder, name), int(name == "create_atomic_rmw")

    def traced(builder: Any, *args: Any) -> Any:
        if current:
            pointers, mask = args[place], args[place_of_mask]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            if place:  # an atomic reads as well
                current[-1].access(pointers.data, mask.data.astype(bool), size, writes=False)
            safe = current[-1].access(pointers.data, mask.data.astype(bool), size, writes=writes)
            mask = interpreter.TensorHandle(safe, mask.dtype)
            args = (*args[:place_of_mask], mask, *args[place_of_mask + 1 :])
        return function(builder, *args)

    return traced


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_view(value: Any) -> bool:
    return isinstance(value, View)
