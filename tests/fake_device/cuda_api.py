"""What stands in `torch.cuda` for the fake device's streams, events and counters."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from tests.fake_device.graphs import Graph, graph_context
from tests.fake_device.streams import Clock, join

_TOTAL_BYTES = 1 << 33
_SHARED_BYTES = 227 << 10
"""A Hopper's."""


class Stream:
    """Stands in for `torch.cuda.Stream`; `queue` is a stream of the timeline, a new one by default."""

    fake: Any

    def __init__(self, device: Any = None, priority: int = 0, queue: Any = None) -> None:
        timeline = self.fake.timeline
        self.queue = queue or timeline.new_stream(f"stream {len(timeline.streams)}")

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        with self.fake.lock:
            join(self.queue.clock, event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self.fake.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.fake.waits("Stream.synchronize", "stream", dict(self.queue.clock))

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """Stands in for `torch.cuda.Event`. One that was never recorded is waited for at once, as CUDA has it."""

    fake: Any

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        with self.fake.lock:
            self.clock = dict((self.fake.current if stream is None else stream.queue).clock)

    def wait(self, stream: Stream | None = None) -> None:
        with self.fake.lock:
            join((self.fake.current if stream is None else stream.queue).clock, self.clock)

    def synchronize(self) -> None:
        self.fake.waits("Event.synchronize", "event", dict(self.clock))

    def query(self) -> bool:
        timeline = self.fake.timeline
        with self.fake.lock:
            timeline.advance()
            is_over: bool = timeline.is_over(self.clock)
            if is_over:
                join(timeline.host, self.clock)
            return is_over


def patches(device: Any) -> dict[str, Any]:
    """Attributes of `torch.cuda` by name."""
    memory, numbers = device.memory, itertools.count(1)
    properties = SimpleNamespace(
        name="fake", uuid="fake", multi_processor_count=1, shared_memory_per_block_optin=_SHARED_BYTES
    )
    return _streams(device) | {
        "CUDAGraph": type("CUDAGraph", (Graph,), {"device": device}),
        "graph": graph_context(device),
        "graph_pool_handle": lambda: (0, next(numbers)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device_of": lambda tensor: nullcontext(),
        "get_device_name": lambda *_: "fake",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "synchronize": lambda *_: device.waits("torch.cuda.synchronize", "device", device.timeline.everything()),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (_TOTAL_BYTES - memory.num_bytes, _TOTAL_BYTES),
        "memory_allocated": lambda *_: memory.num_bytes,
        "memory_reserved": lambda *_: memory.num_bytes,
        "max_memory_allocated": lambda *_: memory.peak,
        "reset_peak_memory_stats": lambda *_: setattr(memory, "peak", memory.num_bytes),
    }


def _streams(device: Any) -> dict[str, Any]:
    made = {name: type(name, (base,), {"fake": device}) for name, base in (("Stream", Stream), ("Event", Event))}
    device.event_class = made["Event"]

    def current(*_: Any) -> Stream:
        stream: Stream = made["Stream"](queue=device.current)
        return stream

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before = device.current
        device.local.stream = chosen.queue
        try:
            yield
        finally:
            device.local.stream = before

    default = made["Stream"](queue=device.default_stream)
    return made | {"current_stream": current, "stream": stream, "default_stream": lambda *_: default}
