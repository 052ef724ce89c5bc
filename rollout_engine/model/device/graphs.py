"""Steps in which every sequence decodes, captured as CUDA graphs for a ladder of batch sizes and replayed.

A step of n sequences is the smallest graph that holds it. What pads it has no context, writes no KV, and nobody reads
its logits. A graph shares out attention's work, so that it serves every context length, computes logits, and draws from
them plainly. A graph knows addresses: when memory has moved, all are captured again.

    host        columns ──upload──> static memory                                           ┌──download──> result
    device                          prepare ── [plan ── forward ── sample ── tell] ── outcome
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rollout_engine.model.device.decode_inputs import DecodeInputs, DecodeStep
from rollout_engine.model.device.draws import DrawColumns
from rollout_engine.model.device.model import DeviceModel
from rollout_engine.model.device.sampler import DrawMemory, draw_plainly
from rollout_engine.model.device.sequences import SequenceRows

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
        rows: SequenceRows,
        max_batch: int,
        *,
        vocab_size: int,
        shares_prefixes: bool,
        capture: Callable[[Callable[[], Tensor]], Captured] | None = None,
    ) -> None:
        """`rows` of the sequences; `capture` is that of CUDA where it is not given."""
        self._model, self._rows, self._capture = model, rows, capture
        self._variants = (False, True) if shares_prefixes else (False,)
        self._sizes = _ladder(max_batch)
        self._inputs = DecodeInputs(max_batch, model.kv.block_size, rows)
        self._drawn = DrawMemory.empty(max_batch, vocab_size, model.device)
        self._last_tokens = rows.last_tokens
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
        self._graphs.clear()
        self._last_tokens = self._rows.last_tokens
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

    def run(self, step: DecodeStep) -> tuple[Tensor, DrawMemory] | None:
        """Logits [n, V], and what has been drawn of n sequences; both last until the next call. None: no graph.

        Where `step.draws` is None, what is drawn means nothing.
        """
        if self._is_void or self._last_tokens is not self._rows.last_tokens:
            self.capture_all()
        count, has_prefixes = len(step.flat.rows), step.prefixes is not None
        size = next((size for size in self._sizes if size >= count), None)
        graph = self._graphs.get((size, has_prefixes)) if size else None
        if graph is None or size is None:
            return None
        self._inputs.put(step, size)
        return graph.replay()[:count], self._drawn.rows(count)

    def draws(self, count: int) -> DrawColumns[Tensor]:
        """What was drawn last from `count` sequences."""
        return self._inputs.draws(count)

    def _captured(self, size: int, has_prefixes: bool, capture: Callable[[Callable[[], Tensor]], Captured]) -> Captured:
        self._inputs.clear()
        batch, draws = self._inputs.batch(size, has_prefixes=has_prefixes), self._inputs.draws(size)
        drawn, model, last_tokens = self._drawn.rows(size), self._model, self._last_tokens
        decoder = model.decoder
        assert decoder is not None, "modules are not captured"

        def compute() -> Tensor:
            model.attention.plan(batch.attention)
            logits = decoder.forward(batch, None, model.kv)
            draw_plainly(logits, draws, drawn, last_tokens)
            return logits

        return capture(compute)


def _ladder(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then every sixteenth up to `max_batch`; beyond 256 every thirty-second."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_batch, 32)]
    return [size for size in steps if size < max_batch] + [max_batch]


def _with_shared_pool() -> Callable[[Callable[[], Tensor]], Captured]:
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: CudaGraph(compute, pool)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
