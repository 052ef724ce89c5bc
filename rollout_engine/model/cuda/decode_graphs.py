"""Decode-only steps as CUDA graphs, captured for a ladder of batch sizes and replayed.

A step of n sequences replays the smallest captured graph that holds it; one whose sequences share prefixes, where no
graph knows prefixes, one that reads them for each sequence. Padding has no context and writes no KV. A graph plans
attention, so it serves every context length, computes logits into memory that all graphs share, and draws from them
without truncation or edits. Graphs hold addresses: when memory has moved, all are captured again.

    host        columns ──upload──> static memory                                           ┌──download──> result
    device                          prepare ── [plan ── forward ── sample ── write] ── outcome
"""

import logging
import time
from bisect import bisect_left

import torch
from torch import Tensor

from rollout_engine.model.cuda.captured_graphs import Capture, Captured, GraphPool, NoRoomForGraph
from rollout_engine.model.cuda.decode_inputs import DecodeInputs, DecodeStep
from rollout_engine.model.cuda.draws import DrawColumns
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.sampler import DrawMemory, draw_plainly
from rollout_engine.model.cuda.sequence_rows import SequenceRows
from rollout_engine.model.sampling.logit_rows import max_rows

logger = logging.getLogger("rollout_engine")

_SECONDS = 60.0
_BYTES = 4 << 30
_NODES_BYTES = 1 << 30
"""For activations of the largest graph, and the driver's nodes of all; not measured on a device yet."""


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
        capture: Capture | None = None,
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
        self._captured: dict[bool, list[int]] = {}
        """Sizes of the captured graphs without and with prefixes, ascending."""
        self._logits: Tensor | None = None
        """[max_batch, V], written by every graph; one of its own for each would take gigabytes."""
        self._is_void = True

    def void(self) -> None:
        """Drop all graphs, because memory has moved; they are captured again before the next replay."""
        self._graphs.clear()
        self._captured, self._logits = {}, None
        self._is_void = True

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture graphs, the largest first, until time or memory run out. Steps that none holds run without a graph.

        A failed capture is the last one: torch before 2.13 goes on to count it as under way. Graphs for which there is
        no room are left out before they are begun.
        """
        started, before = time.perf_counter(), _free_bytes()
        self.void()
        self._last_tokens, self._is_void = self._rows.last_tokens, False
        problems: list[str] = []
        try:
            self._logits = self._logits_memory()
            capture = self._capture or GraphPool().capture
            for size, has_prefixes in self._wanted():
                if time.perf_counter() - started > _SECONDS or before - _free_bytes() > _BYTES:
                    break
                try:
                    self._graphs[size, has_prefixes] = self._capture_one(size, has_prefixes, capture)
                except NoRoomForGraph as problem:  # a smaller one may fit
                    problems.append(f"for {size} sequences: {problem}")
        except Exception as problem:  # steps can run without any graph
            problems.append(f"{type(problem).__name__}: {problem}")
        self._know_captured()
        wanted, taken = len(self._wanted()), before - _free_bytes()
        if problems:
            text = "%d of %d CUDA graphs were captured; steps that fit none run without, more slowly. First problem: %s"
            logger.warning(text, len(self._graphs), wanted, problems[0])
        seconds = time.perf_counter() - started
        logger.info("%s graphs captured in %.1f s, %.0f MiB.", self.described(), seconds, taken / 2**20)

    def described(self) -> str:
        """How many graphs there are, of those wanted: "52 of 52"."""
        return f"{len(self._graphs)} of {len(self._wanted())}"

    def run(self, step: DecodeStep) -> tuple[Tensor, DrawMemory] | None:
        """Logits [n, V] and draws of n sequences, valid until the next call; None where no graph fits.

        Where `step.draws` is None the draws are meaningless.
        """
        if self._is_void or self._last_tokens is not self._rows.last_tokens:
            self.capture_all()
        count = len(step.flat.rows)
        found = self._fitting(count, step.prefixes is not None)
        if found is None:
            return None
        size, has_prefixes = found
        self._inputs.put(step if has_prefixes else step._replace(prefixes=None), size)
        self._graphs[found].replay()
        assert self._logits is not None, "graphs write it"
        return self._logits[:count], self._drawn.rows(count)

    def draws(self, count: int) -> DrawColumns[Tensor]:
        """The columns of the last draws from `count` sequences."""
        return self._inputs.draws(count)

    def _wanted(self) -> list[tuple[int, bool]]:
        return [(size, has_prefixes) for size in reversed(self._sizes) for has_prefixes in self._variants]

    def _know_captured(self) -> None:
        for has_prefixes in self._variants:
            self._captured[has_prefixes] = sorted(size for size, kind in self._graphs if kind == has_prefixes)

    def _logits_memory(self) -> Tensor:
        weight, decoder = next(self._model.module.parameters()), self._model.decoder
        assert decoder is not None, "modules are not captured"
        return weight.new_empty(self._sizes[-1], decoder.vocab_size)

    def _fitting(self, count: int, has_prefixes: bool) -> tuple[int, bool] | None:
        """Size and variant of the smallest graph for `count` sequences, with prefixes where they are wanted."""
        for variant in (True, False) if has_prefixes else (False,):
            sizes = self._captured.get(variant, [])
            place = bisect_left(sizes, count)
            if place < len(sizes):
                return sizes[place], variant
        return None

    def _capture_one(self, size: int, has_prefixes: bool, capture: Capture) -> Captured:
        self._inputs.clear()
        batch, draws = self._inputs.batch(size, has_prefixes=has_prefixes), self._inputs.draws(size)
        drawn, model, last_tokens = self._drawn.rows(size), self._model, self._last_tokens
        decoder, logits = model.decoder, self._logits
        assert decoder is not None and logits is not None, "modules are not captured"
        out = logits[:size]

        def compute() -> None:
            model.attention.plan(batch.attention)
            decoder.write_logits(batch, model.kv, out)
            draw_plainly(out, draws, drawn, last_tokens)

        return capture(compute)


def _ladder(max_batch: int) -> list[int]:
    """Batch sizes 1, 2, 4, 8, then every 16th, from 256 on every 32nd, and `max_batch` itself."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_batch, 32)]
    return [size for size in steps if size < max_batch] + [max_batch]


def graph_bytes(max_batch: int, vocab_size: int, itemsize: int) -> int:
    """Bytes to leave for all graphs: their logits, and an estimate of the rest, which is bounded as captures are."""
    return min(_BYTES, max_batch * vocab_size * itemsize + _NODES_BYTES)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
