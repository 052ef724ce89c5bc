"""A CUDA device that is not there: our host code runs on it unchanged, and its mistakes in ordering are found.

    host      launch ── launch ── record ── wait ── free ── ...      what the host and each stream know of one another
    streams   queues of operations, run at moments that a seed draws     of each byte: who wrote and read it last
    memory    CPU memory that says it is CUDA's, NaN when it is new      of each byte: whether it has been written

`FakeDevice` replaces the streams, events, graphs and counters of `torch.cuda`, and takes every operator of torch and
every kernel of Triton that touches the device's memory. Nothing runs when it is launched. An operation may run once
all that must come before it has run, and has to when somebody waits for it; between the two a seed decides, so a
failure comes again with its seed. Each access is compared with earlier ones as `torch.cuda._sanitizer` does it, by
clocks that events and waits join, but byte by byte: an order that was right by luck is a fault as well.

It finds: operations of two streams on the same bytes without an order; memory that the allocator hands out while
another stream uses it; pinned memory that the host reads before a copy has come, or writes before one has gone; bytes
read that nobody has written; addresses outside of what was allocated when a kernel was launched; graphs over memory
that has been released or has moved since they were captured; and it lists every wait of the host.

It does not model: how long anything takes; order within a kernel (races between its programs, barriers); code that
was compiled (Triton's interpreter computes); errors and limits of the driver; several devices, NCCL, memory of other
processes. All host threads count as one. Of a host's writes to pinned memory it sees torch's and item assignments to
arrays; a memoryview counts as written when it is taken. Released memory comes back in its old place; graphs that knew
its address are told of, tables of addresses are not. Operators read and write all of their tensors, but for those that
pick elements. What torch composes of others by the device (`one_hot`) is composed as for the host, and does not run.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rollout_engine.kernels import dense_attention
from sync.tensor_check import _device_is_supported
from tests.fake_device.accesses import Accesses
from tests.fake_device.calls import Calls
from tests.fake_device.cuda_api import patches
from tests.fake_device.graphs import Graph
from tests.fake_device.host_views import DeviceStorage, WatchedArray
from tests.fake_device.kernels import queued_kernels
from tests.fake_device.memory import POISON, Block, Fault, Memory, View
from tests.fake_device.operators import Operators, copy_set
from tests.fake_device.streams import Operation, Order, Stream, Timeline

Run = Callable[[Operation], None]


class Wait(NamedTuple):
    """A place where the host waited for the device."""

    kind: str
    """"scalar read", "nonzero", "boolean mask", "unpinned copy", "blocking copy", "event", "stream", "device", ..."""
    what: str
    functions: tuple[str, ...]
    """Names of the functions that were running, outermost first."""
    place: str
    """File and line of ours."""


class FakeDevice:
    """One device, as a context manager. `seed` and `order` decide when operations run.

    `reuses`: freed memory is handed out at once, as torch does. Otherwise never, and no stale address finds new values.
    """

    def __init__(self, seed: int = 0, order: Order = "random", *, reuses: bool = True) -> None:
        self.timeline = Timeline(seed, order)
        self.memory = Memory(self.timeline, reuses=reuses)
        self.accesses = Accesses(self.memory, self.timeline)
        self.lock = self.timeline.lock
        self.waits_seen: list[Wait] = []
        self.default_stream = self.timeline.new_stream("default")
        self.local = threading.local()
        self.event_class: Any = None
        self._stack = ExitStack()

    @property
    def faults(self) -> list[Fault]:
        """What has been found in operations that have run."""
        return self.accesses.faults

    def __enter__(self) -> "FakeDevice":
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in patches(self).items():
            patch.setattr(torch.cuda, name, value)
        for name, method in self._methods().items():
            patch.setattr(Tensor, name, method)
        self._stack.enter_context(queued_kernels(self, patch))
        run = threading.Thread.run

        def run_thread(thread: threading.Thread) -> None:
            with Calls(self), Operators(self):
                run(thread)

        patch.setattr(threading.Thread, "run", run_thread)
        for known in (_device_is_supported, dense_attention._unpacked):  # of another device, or of none
            known.cache_clear()
            self._stack.callback(known.cache_clear)
        self._stack.enter_context(Calls(self))
        self._stack.enter_context(Operators(self))
        return self

    def __exit__(self, *problem: Any) -> None:
        self._stack.close()

    def finish(self) -> None:
        """Run all that is queued; the host does not count as having waited. Raises the first error of an operation."""
        with self.lock:
            self.timeline.finish(self.timeline.everything())

    # Streams

    @property
    def current(self) -> Stream:
        """This thread's stream."""
        stream: Stream = getattr(self.local, "stream", self.default_stream)
        return stream

    @property
    def capture(self) -> Graph | None:
        """The graph that this thread captures."""
        return getattr(self.local, "capture", None)

    def launch(self, name: str, run: Run) -> None:
        """Queue `run` on this thread's stream, or in the graph that is being captured."""
        with self.lock:
            self.memory.settle()
            named = f"{name} at {_place()}"
            if self.capture is not None:
                self.capture.launches.append((named, run))
            else:
                self.launch_on(self.current, named, run)

    def launch_on(self, stream: Stream, name: str, run: Run) -> None:
        """Queue `run` on `stream`."""

        def run_plainly(operation: Operation) -> None:
            with self.plainly(), torch.no_grad():
                run(operation)

        with self.lock:
            self.memory.tick += 1
            self.timeline.launch(stream, name, run_plainly, self.memory.tick)

    def waits(self, what: str, kind: str, clock: dict[str, int] | None = None) -> None:
        """Have the host wait for `clock`, this thread's stream by default."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        functions = tuple(frame.name for frame in traceback.extract_stack())
        self.waits_seen.append(Wait(kind, what, functions, _place()))
        with self.lock:
            self.timeline.wait(dict(self.current.clock) if clock is None else clock)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """torch works as ever inside."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    # Memory

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        block = self.memory.block_of(tensor)
        return block is not None and not block.is_pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        block = self.memory.block_of(tensor)
        return block is not None and block.is_pinned

    def storage_of(self, tensor: Tensor) -> Any:
        block, real = self.memory.block_of(tensor), tensor.untyped_storage()
        return real if block is None or block.is_pinned else DeviceStorage(self, real, block)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """Methods of tensors that take only streams and storages of torch, and so cannot be taken as other calls."""
        base = torch._C.TensorBase

        def record_stream(tensor: Tensor, stream: Any) -> None:
            if (block := self.memory.block_of(tensor)) is not None:
                block.streams.add(stream.queue.name)

        def set_(tensor: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
            return base.set_(tensor, getattr(source, "real", source), *args, **kwargs)

        return {"record_stream": record_stream, "set_": set_}

    def empty_as(self, form: Tensor) -> Tensor:
        """Memory on the device for a tensor like `form`."""
        graph = self.capture
        pool = self.current.name if graph is None else ("graphs", graph.pool)
        return self._allocate(form, pool, pinned=False)

    def pinned_as(self, form: Tensor) -> Tensor:
        """Pinned memory for a tensor like `form`."""
        return self._allocate(form, "pinned", pinned=True)

    def pinned_copy(self, tensor: Tensor, *_: Any) -> Tensor:
        made = self.pinned_as(tensor)
        with self.plainly():
            made.copy_(tensor)
            self.host_writes(made, "pin_memory")
        return made

    def filled(self, values: Tensor) -> Tensor:
        """A tensor on the device that a kernel fills with `values` of the host."""
        made = self.empty_as(values)
        view, content = self.view(made), values.clone()

        def fill(operation: Operation) -> None:
            view.tensor().copy_(content)
            self.accesses.write(operation, view.block, view.where())

        self.launch("fill", fill)
        return made

    def view(self, tensor: Tensor) -> View:
        """A tensor on the device or in pinned memory, without a reference to it."""
        block = self.memory.block_of(tensor)
        assert block is not None
        return View.of(tensor, block)

    def resize(self, block: Block, num_bytes: int) -> None:
        """Release the memory of a storage, or take it again."""
        with self.lock:
            if block.is_in_use:
                self.memory.retire(block)
            if num_bytes:
                self.memory.revive(block, num_bytes)
            self.launch("resize_", self._poisoning(block))

    def _allocate(self, form: Tensor, pool: Any, *, pinned: bool) -> Tensor:
        with self.lock, self.plainly():
            sizes = [(n - 1) * step for n, step in zip(form.shape, form.stride(), strict=True)]
            num_bytes = (1 + sum(sizes)) * form.itemsize if form.numel() else 0
            block, held = self.memory.allocate(num_bytes, pool, pinned=pinned)
            poison = self._poisoning(block)
            if pinned:
                poison(self.timeline.touch("the allocator of pinned memory", self.memory.tick))
            else:
                self.launch("allocator", poison)
            empty = torch.empty(0, dtype=form.dtype)
            return empty.set_(held.untyped_storage(), 0, form.shape, form.stride())

    def _poisoning(self, block: Block) -> Run:
        def poison(operation: Operation) -> None:
            self.accesses.hand_out(operation, block)
            block.bytes[:] = POISON

        return poison

    # Copies, and accesses by the host

    def copy(self, out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """`out.copy_(source)`, wherever the two are."""
        with self.lock, self.plainly():
            blocks = [self.memory.block_of(each) for each in (source, out)]
            if all(block is None or block.is_pinned for block in blocks):
                self._copy_on_host(out, source)
                return out
            source_view, out_view = (None if self.memory.block_of(t) is None else self.view(t) for t in (source, out))
            content = source.clone() if source_view is None else None
            target = out if out_view is None else None

            def run(operation: Operation) -> None:
                if source_view is not None:
                    self.accesses.check_live(operation, source_view)
                    where = source_view.where()
                    self.accesses.read(operation, source_view.block, where, must_be_set=out_view is None)
                values = content if source_view is None else source_view.tensor()
                assert values is not None
                if out_view is None:
                    assert target is not None
                    target.copy_(values)
                    return
                self.accesses.check_live(operation, out_view)
                out_view.tensor().copy_(values)
                self.accesses.write(operation, out_view.block, out_view.where())
                if source_view is not None:
                    copy_set(source_view, out_view)

            self.launch("copy_", run)
            if None in blocks:
                self.waits("a copy from or to memory that is not pinned", "unpinned copy")
            elif any(block.is_pinned for block in blocks if block is not None):
                if not non_blocking:
                    self.waits("a copy without non_blocking", "blocking copy")
                for block in blocks:
                    if block is not None and block.is_pinned:
                        block.uses.append(dict(self.current.clock))
            return out

    def _copy_on_host(self, out: Tensor, source: Tensor) -> None:
        if self.is_pinned(source):
            self.host_reads(source, "copy_")
        out.copy_(source)
        if self.is_pinned(out):
            self.host_writes(out, "copy_")

    def host_reads(self, tensor: Tensor, name: str, *, must_be_set: bool = True) -> None:
        """The host reads pinned memory now."""
        with self.lock, self.plainly():
            if tensor.numel() and (block := self.memory.block_of(tensor)) is not None:
                self.timeline.advance()
                operation = self._host_access(name)
                self.accesses.read(operation, block, View.of(tensor, block).where(), must_be_set=must_be_set)

    def host_writes(self, tensor: Tensor, name: str) -> None:
        """The host has written pinned memory now."""
        with self.lock, self.plainly():
            if tensor.numel() and (block := self.memory.block_of(tensor)) is not None:
                self.host_writes_at(block, View.of(tensor, block).where(), name)

    def host_writes_at(self, block: Block, where: Any, name: str) -> None:
        """The host has written those bytes of pinned memory now."""
        with self.lock:
            self.accesses.write(self._host_access(name), block, where)

    def numpy(self, tensor: Tensor, **options: Any) -> Any:
        """An array over a tensor of the host."""
        with self.plainly():
            array = tensor.numpy(**options)
        block = self.memory.block_of(tensor)
        if block is None:
            return array
        self.host_reads(tensor, "numpy", must_be_set=False)
        watched = array.view(WatchedArray)
        watched.watcher, watched.block = self, block
        return watched

    def _host_access(self, name: str) -> Operation:
        self.memory.tick += 1
        return self.timeline.touch(f"{name} at {_place()}", self.memory.tick)


def _place() -> str:
    """File, line and function of the innermost code of ours."""
    frame: Any = sys._getframe(1)
    inner = frame
    while frame is not None:
        code = frame.f_code
        if "/rollout_engine/" in code.co_filename or "/sync/" in code.co_filename:
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
        if "/fake_device/" in inner.f_code.co_filename or "/torch/" in inner.f_code.co_filename:
            inner = frame
        frame = frame.f_back
    return f"{inner.f_code.co_filename.rpartition('/')[2]}:{inner.f_lineno} {inner.f_code.co_name}"
