"""Launch the layers' kernels on a stub of the driver library, and print what was found as JSON.

    python -m tests.unit.kernels.triton.launch_on_stub small|whole

Each call is made three times: as found by `launches` after other calls, then as Triton itself launches it, then as
found again. All three should pass the driver the same bytes: the arguments, in the sizes that the PTX declares.
"""

import itertools
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.compiler.compiler import CompiledKernel

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton import activation, attention, launches, matmul, norm, rotary
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention
from rollout_engine.kernels.triton.rotary import HeadNorms, Rotary
from tests.unit.kernels.triton.driver_stub import DriverStub, Launch, activate

LAUNCHERS = [norm._norm, activation._gated, rotary._rotary, matmul._matmul, attention._attention, attention._merge]
DTYPE = torch.bfloat16


def tensor(*shape: int, offset: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Uninitialised; its address is `offset` elements past a multiple of 64 bytes."""
    size = torch.Size(shape).numel()
    return torch.empty(size + 64, dtype=dtype)[offset : offset + size].view(shape)


def small_calls(offset: int, rows: int) -> Iterator[Callable[[], Any]]:
    """Calls of kernels that compile in a second; some tensors begin `offset` elements past an aligned address."""
    hidden, weight = tensor(rows, 1024, offset=offset), tensor(1024)
    yield lambda: norm.rms_norm(hidden, weight, 1e-6, tensor(rows, 1024))
    yield lambda: norm.add_rms_norm(tensor(rows, 1024), hidden, weight, 1e-6, hidden)
    heads = tensor(rows, 8, 128, offset=offset)
    yield lambda: norm.rms_norm(heads, tensor(128), 1e-6, heads)
    gate, up = tensor(rows, 6144, offset=offset).chunk(2, dim=1)
    yield lambda: activation.gated(gate, up, gate)


def large_calls(offset: int, rows: int) -> Iterator[Callable[[], Any]]:
    """Calls of the others."""
    qkv = tensor(rows, 4096, offset=offset).split([2048, 1024, 1024], dim=1)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in qkv)
    layer, tables = KVLayer.zeros(64, 8, 16, 128, 128, dtype=DTYPE, device="cpu"), (tensor(64, 128), tensor(64, 128))
    columns = torch.zeros(rows + 1, dtype=torch.int64)[1:]
    for norms in (None, HeadNorms(tensor(128), tensor(128, offset=offset), 1e-6)):
        yield lambda norms=norms: rotary.rotate_and_write(q, k, v, columns, columns, Rotary(*tables), layer, q, norms)
    weight = tensor(2048, 1024)
    for bias in (None, tensor(2048, offset=offset)):
        yield lambda bias=bias: matmul.matmul(tensor(rows, 1024), weight, bias, tensor(rows, 2048))
    heads = Heads(16, 8, 128, 128, DTYPE)
    for deterministic, window, is_chunk in itertools.product((False, True), (0, 128), (False, True)):
        planned = PagedAttention(heads, Limits(512, 64, 4096), "cpu", deterministic=deterministic, num_processors=132)
        starts = torch.tensor([0, rows], dtype=torch.int32) if is_chunk else torch.arange(rows + 1, dtype=torch.int32)
        lens, blocks = torch.full((len(starts) - 1,), 100, dtype=torch.int32), torch.zeros(rows, 256, dtype=torch.int32)
        planned.plan(Batch(starts, lens, blocks, 0 if is_chunk else rows), {window})
        params, out = AttentionParams(scale=0.1, sliding_window=window), tensor(rows, 16, 128)
        yield lambda planned=planned, params=params, out=out: planned.attend(q, layer, params, out)


class Recorder:
    """Watches `Launcher.launch`."""

    def __init__(self, stub: DriverStub) -> None:
        self.num_compared = 0
        self._stub, self._launch = stub, Launcher.launch

    def watch(self) -> None:
        def launch(launcher: Launcher, grid: Any, pointers: Any, free: Any, rest: Any, **options: Any) -> None:
            arguments = launcher, grid, pointers, free, rest
            found, known = self._passed(*arguments, **options), dict(launcher._compiled)
            launcher._compiled.clear()
            by_triton = self._passed(*arguments, **options)
            again = self._passed(*arguments, **options)
            launcher._compiled |= known
            assert found == by_triton == again, (found, by_triton, again)
            expected = _bytes(self._stub.kernels[again.function], launcher._arrange(pointers, free, rest))
            assert list(again.arguments) == [*expected, bytes(8), bytes(8)], (again.arguments, expected)
            self.num_compared += 1

        Launcher.launch = launch

    def _passed(self, *arguments: Any, **options: Any) -> Launch:
        before = self._stub.num_launches
        self._launch(*arguments, **options)
        assert self._stub.num_launches == before + 1, "not one launch"
        return self._stub.last_launch()


def _bytes(kernel: CompiledKernel, arguments: tuple[Any, ...]) -> Iterator[bytes]:
    """The arguments that are no constants of `kernel`."""

    def flat(kinds: Any, values: Any) -> Iterator[bytes]:
        for kind, value in zip(kinds, values, strict=True):
            if isinstance(kind, tuple):
                yield from flat(kind, value)
            elif kind.startswith("*"):
                yield struct.pack("Q", value.data_ptr())
            elif kind != "constexpr":
                yield struct.pack({"i32": "i", "i64": "q", "fp32": "f"}[kind], value)

    yield from flat(kernel.src.signature.values(), arguments)


def compare(stub: DriverStub, is_whole: bool) -> int:
    """The number of launches that were compared, in random order."""
    calls = []
    for offset, rows in itertools.product((0, 1, 8), (1, 16, 17)):
        calls += small_calls(offset, rows)
        if is_whole and (offset, rows) in ((0, 16), (8, 17)):
            calls += large_calls(offset, rows)
    random.Random(0).shuffle(calls)
    recorder = Recorder(stub)
    recorder.watch()
    try:
        for call in calls:
            call()
    finally:
        Launcher.launch = recorder._launch
    return recorder.num_compared


def sees_planted_fault(stub: DriverStub) -> bool:
    """Whether the comparison fails where aligned addresses are not told from others."""
    launches._aligned, aligned = lambda addresses: True, launches._aligned
    try:
        compare(stub, is_whole=False)
    except AssertionError:
        return True
    finally:
        launches._aligned = aligned
    return False


def seconds(call: Callable[[], Any], rounds: int = 5, times: int = 200) -> float:
    """Seconds of one call, the least of the rounds' means."""
    call()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            call()
        taken.append((time.process_time() - start) / times)
    return min(taken)


def host_seconds() -> dict[str, float]:
    """Seconds of the host for the kernels of one layer, in a step with decodes and a chunk; and launched by Triton."""
    rows, decodes = 505, 249
    hidden, weight = tensor(rows, 1024), tensor(1024)
    gate, up = tensor(rows, 6144).chunk(2, dim=1)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in tensor(rows, 4096).split([2048, 1024, 1024], dim=1))
    layer, tables = KVLayer.zeros(64, 8, 16, 128, 128, dtype=DTYPE, device="cpu"), (tensor(64, 128), tensor(64, 128))
    columns = torch.zeros(rows, dtype=torch.int64)
    planned = PagedAttention(Heads(16, 8, 128, 128, DTYPE), Limits(512, 256, 4096), "cpu", num_processors=132)
    starts = torch.tensor([*range(decodes + 1), rows], dtype=torch.int32)
    lens, blocks = torch.full((decodes + 1,), 300, dtype=torch.int32), torch.zeros(decodes + 1, 256, dtype=torch.int32)
    planned.plan(Batch(starts, lens, blocks, decodes), {0})
    params, out = AttentionParams(scale=0.1), tensor(rows, 16, 128)

    def one_layer() -> None:
        norm.add_rms_norm(hidden, hidden, weight, 1e-6, hidden)
        rotary.rotate_and_write(q, k, v, columns, columns, Rotary(*tables), layer, q)
        planned.attend(q, layer, params, out)
        norm.add_rms_norm(hidden, hidden, weight, 1e-6, hidden)
        activation.gated(gate, up, gate)

    def as_triton(self: Launcher, grid: Any, pointers: Any, free: Any, rest: Any, **options: Any) -> None:
        self._kernel[grid](*self._arrange(pointers, free, rest), **self._options, **options)

    found, launch = seconds(one_layer), Launcher.launch
    Launcher.launch = as_triton
    bound = seconds(one_layer)
    Launcher.launch = launch
    return {"found": found, "bound": bound}


def main(what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stub = activate(Path(folder))
        figures: dict[str, Any] = {"compared": compare(stub, what == "whole")}
        figures["sees_planted_fault"] = sees_planted_fault(stub)
        if what == "whole":
            figures["layer_seconds"] = host_seconds()
        print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
