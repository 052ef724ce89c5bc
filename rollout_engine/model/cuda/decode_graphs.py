"""Decode-only steps as CUDA graphs, captured for a ladder of batch sizes and replayed.

A step of n sequences replays the smallest graph that holds it. Padding has no context and writes no KV. A graph plans
attention, so it serves every context length, computes logits, and draws from them without truncation or edits. Graphs
hold addresses: when memory has moved, all are captured again.

    host        columns ──upload──> static memory                                           ┌──download──> result
    device                          prepare ── [plan ── forward ── sample ── write] ── outcome
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rollout_engine.model.cuda.decode_inputs import DecodeInputs, DecodeStep
from rollout_engine.model.cuda.draws import DrawColumns
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.sampler import DrawMemory, draw_plainly
from rollout_engine.model.cuda.sequence_rows import SequenceRows
from rollout_engine.model.sampling.logit_rows import max_rows

logger = logging.getLogger("rollout_engine")

_SECONDS = 60.0
_BYTES = 4 << 30


class Captured(Protocol):
    """A computation over static memory."""

    def replay(self) -> Tensor:
        """Compute again, and return the tensor returned at capture, with new values."""
        ...


class CudaGraph:
    """One CUDA graph. Graphs that share a memory pool must not run at the same time."""

    def __init__(self, compute: Callable[[], Tensor], pool: tuple[int, int]) -> None:
        """Run `compute` once, so that its kernels are compiled, and capture it."""
        compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails leaves its own one current
            # Weights may be on their way meanwhile: what other threads do must not end the capture.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = compute()

    def replay(self) -> Tensor:
        """The next replay overwrites the output."""
        self._graph.replay()
        return self._output


class DecodeGraphs:
    """The graphs of one model with fused layers."""

    def __init__(
        self,
        model: CudaModel,
        rows: SequenceRows,
        max_batch: int,
        *,
        vocab_size: int,
        shares_prefixes: bool,
        capture: Callable[[Callable[[], Tensor]], Captured] | None = None,
    ) -> None:
        """`capture` replaces CUDA's, for tests."""
        max_batch = min(max_batch, max_rows(vocab_size, model.device))  # larger steps draw piece by piece
        self._model, self._rows, self._capture = model, rows, capture
        self._variants = (False, True) if shares_prefixes else (False,)
        self._sizes = _ladder(max_batch)
        self._inputs = DecodeInputs(max_batch, model.kv.block_size, rows)
        self._drawn = DrawMemory.empty(max_batch, vocab_size, model.device)
        self._last_tokens = rows.last_tokens
        self._graphs: dict[tuple[int, bool], Captured] = {}
        self._is_void = True

    def void(self) -> None:
        """Drop all graphs, because memory has moved; they are captured again before the next replay."""
        self._graphs.clear()
        self._is_void = True

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture graphs, the largest first, until time or memory run out. Steps of other sizes run without a graph."""
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
                except Exception as problem:  # steps can run without any graph
                    problems.append(f"of {size} sequences: {type(problem).__name__}: {problem}")
        if problems:
            text = "%d CUDA graphs could not be captured; steps of their sizes run without, more slowly. The first, %s"
            logger.warning(text, len(problems), problems[0])
        wanted, taken = len(self._sizes) * len(self._variants), before - _free_bytes()
        seconds = time.perf_counter() - started
        logger.info("%d of %d graphs captured in %.1f s, %.0f MiB.", len(self._graphs), wanted, seconds, taken / 2**20)

    def run(self, step: DecodeStep) -> tuple[Tensor, DrawMemory] | None:
        """Logits [n, V] and draws of n sequences, valid until the next call; None where no graph fits.

        Where `step.draws` is None the draws are meaningless.
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
        """The columns of the last draws from `count` sequences."""
        return self._inputs.draws(count)

    def _captured(self, size: int, has_prefixes: bool, capture: Callable[[Callable[[], Tensor]], Captured]) -> Captured:
        self._inputs.clear()
        batch, draws = self._inputs.batch(size, has_prefixes=has_prefixes), self._inputs.draws(size)
        drawn, model, last_tokens = self._drawn.rows(size), self._model, self._last_tokens
        decoder = model.decoder
        assert decoder is not None, "modules are not captured"

        def compute() -> Tensor:
            model.attention.plan(batch.attention)
            logits = decoder.forward(batch, None, model.kv).take(slice(None))
            draw_plainly(logits, draws, drawn, last_tokens)
            return logits

        return capture(compute)


def _ladder(max_batch: int) -> list[int]:
    """Batch sizes 1, 2, 4, 8, then every 16th, from 256 on every 32nd, and `max_batch` itself."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_batch, 32)]
    return [size for size in steps if size < max_batch] + [max_batch]


def _with_shared_pool() -> Callable[[Callable[[], Tensor]], Captured]:
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: CudaGraph(compute, pool)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
