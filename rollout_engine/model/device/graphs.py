"""Steps in which every sequence decodes, captured as CUDA graphs for a ladder of batch sizes and replayed.

A step of n sequences is the smallest graph that holds it. What pads it has no context, writes no KV, and nobody reads
its logits. Inputs are copied into static memory; attention's work is planned anew before each replay, so one graph
serves every context length. A graph knows addresses: when memory has moved, all are captured again.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rollout_engine.kernels.triton.paged_attention import Batch, Prefixes
from rollout_engine.kernels.triton.work import COLUMNS
from rollout_engine.model.device.model import DeviceModel
from rollout_engine.model.device.pool import DeviceBatch

logger = logging.getLogger("rollout_engine")

_SECONDS = 60.0
_BYTES = 4 << 30


class Captured(Protocol):
    """A computation over static memory."""

    def replay(self) -> Tensor:
        """Compute again what it returned when it was captured, in the same memory."""
        ...


class CudaGraph:
    """One graph; those captured with the same pool of memory share it and must not run at once."""

    def __init__(self, compute: Callable[[], Tensor], pool: tuple[int, int]) -> None:
        """`compute` runs once before it is captured: kernels are compiled by then."""
        compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails leaves its own one current
            # Weights may be on their way meanwhile: what other threads do must not end the capture.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = compute()

    def replay(self) -> Tensor:
        """The output's memory is that of all replays: copy what has to last."""
        self._graph.replay()
        return self._output


class DecodeGraphs:
    """Of one model with fused layers."""

    def __init__(
        self,
        model: DeviceModel,
        max_batch: int,
        *,
        shares_prefixes: bool,
        capture: Callable[[Callable[[], Tensor]], Captured] | None = None,
    ) -> None:
        """`capture` is that of CUDA where it is not given."""
        device, max_blocks = model.device, -(-model.limits.context // model.kv.block_size)
        self._model, self._capture = model, capture
        self._variants = (False, True) if shares_prefixes else (False,)
        self._sizes = _ladder(max_batch)
        self._columns = torch.zeros(3, max_batch, dtype=torch.int64, device=device)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._units = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_batch, max_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], Captured] = {}
        self._is_void = True

    def void(self) -> None:
        """Memory has moved: capture again before the next replay."""
        self._graphs.clear()
        self._is_void = True

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture, the largest first, until time or memory are up; what is left out, or fails, runs without a graph."""
        started, before = time.perf_counter(), _free_bytes()
        capture, self._is_void = self._capture or _with_shared_pool(), False
        problems: list[str] = []
        for size in reversed(self._sizes):
            for has_prefixes in self._variants:
                if time.perf_counter() - started > _SECONDS or before - _free_bytes() > _BYTES:
                    break
                try:
                    self._graphs[size, has_prefixes] = self._captured(size, has_prefixes, capture)
                except Exception as problem:  # of the allocator, the driver or a compiler: none is needed for a step
                    problems.append(f"of {size} sequences: {type(problem).__name__}: {problem}")
        if problems:
            what = "CUDA graphs could not be captured; steps of their sizes run without, more slowly. The first"
            logger.warning("%d %s, %s", len(problems), what, problems[0])
        wanted, taken = len(self._sizes) * len(self._variants), before - _free_bytes()
        seconds = time.perf_counter() - started
        logger.info("%d of %d graphs captured in %.1f s, %.0f MiB.", len(self._graphs), wanted, seconds, taken / 2**20)

    def run(self, batch: DeviceBatch) -> Tensor | None:
        """Logits [n, V] of a batch of n sequences that all decode; they last until the next call. None: no graph."""
        if self._is_void:
            self.capture_all()
        attention, count = batch.attention, len(batch.token_ids)
        size = next((size for size in self._sizes if size >= count), None)
        graph = self._graphs.get((size, attention.prefixes is not None)) if size else None
        if graph is None or size is None:
            return None
        columns = torch.stack([batch.token_ids, batch.positions, batch.slots])
        self._columns[:, :count] = columns
        self._columns[2, count:size] = -1
        self._columns[:2, count:size] = 0
        self._lens[:count] = attention.context_lens
        self._lens[count:size] = 0
        self._tables[:count] = attention.block_tables
        prefixes = None
        if attention.prefixes is not None:
            self._units[:count] = attention.prefixes.units
            self._units[count:size] = 0
            prefixes = Prefixes(attention.prefixes.items, self._units[:size])
        self._model.attention.plan(self._batch(size, prefixes).attention)
        return graph.replay()[:count]

    def _batch(self, size: int, prefixes: Prefixes | None) -> DeviceBatch:
        token_ids, positions, slots = self._columns[:, :size]
        tables, lens = self._tables[:size], self._lens[:size]
        return DeviceBatch(token_ids, positions, slots, Batch(self._starts[: size + 1], lens, tables, size, prefixes))

    def _captured(self, size: int, has_prefixes: bool, capture: Callable[[Callable[[], Tensor]], Captured]) -> Captured:
        prefixes = None
        if has_prefixes:
            items = torch.zeros(0, COLUMNS, dtype=torch.int32, device=self._units.device)
            prefixes = Prefixes(items, self._units[:size].zero_())
        self._columns[2].fill_(-1)
        self._lens.zero_()
        batch, decoder = self._batch(size, prefixes), self._model.decoder
        assert decoder is not None, "modules are not captured"
        self._model.attention.plan(batch.attention)
        return capture(lambda: decoder.forward(batch, None, self._model.kv))


def _ladder(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then every sixteenth up to `max_batch`; beyond 256 every thirty-second."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_batch, 32)]
    return [size for size in steps if size < max_batch] + [max_batch]


def _with_shared_pool() -> Callable[[Callable[[], Tensor]], Captured]:
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: CudaGraph(compute, pool)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
