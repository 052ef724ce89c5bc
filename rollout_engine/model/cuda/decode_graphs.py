"""Decode-only steps as CUDA graphs, captured for a ladder of batch sizes and replayed.

A step of n sequences replays the smallest captured graph that holds it; one whose sequences share prefixes, if no
graph has prefixes, one that reads them for each sequence. Padding has no context and writes no KV. A graph plans
attention, so it serves every context length, computes logits into memory that all graphs share, and draws from them
without truncation or edits. Graphs hold addresses: when memory has moved, as after sleep, each is captured again by the
first step that needs it, so that waking up does not wait for graphs that no step may need. So are graphs for rows with
adapters: they read from tables which matrices a row has, and are captured again when other layers have some.

    host        columns ──upload──> static memory                                           ┌──download──> result
    device                          prepare ── [plan ── forward ── sample ── write] ── outcome
"""

import logging
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

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


class Variant(NamedTuple):
    """Optional parts of a graph's computation."""

    has_prefixes: bool
    """Whether it reads prefixes that sequences share once for all."""
    has_adapters: bool


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
        self._model, self._rows, self._given_capture = model, rows, capture
        self._has_prefixes = (False, True) if shares_prefixes else (False,)
        self._sizes = _ladder(max_batch)
        has_states = not model.kv.states.is_empty
        self._inputs = DecodeInputs(max_batch, model.kv.block_size, rows, has_states=has_states)
        self._drawn = DrawMemory.empty(max_batch, vocab_size, model.device)
        self.void()

    def void(self) -> None:
        """Drop all graphs, because memory has moved; each is captured again when a step first needs it."""
        self._graphs: dict[tuple[int, Variant], Captured] = {}
        self._captured: defaultdict[Variant, list[int]] = defaultdict(list)
        """Sizes of captured graphs, ascending."""
        self._adapted_groups: tuple[tuple[int, int], ...] = ()
        """`CudaAdapterPool.layout` when graphs with adapters were captured."""
        self._logits: Tensor | None = None
        """[max_batch, V], written by every graph; one of its own for each would take gigabytes."""
        self._capture: Capture | None = self._given_capture
        self._last_tokens = self._rows.last_tokens
        self._problems: dict[tuple[int, Variant], str] = {}
        """Graphs that were not captured, and why."""
        self._captures_more, self._has_failed = True, False
        self._num_bytes, self._num_seconds = 0, 0.0

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture all graphs, the largest first, until time or memory run out; later steps capture no more.

        Steps that none holds run without a graph.
        """
        self.void()
        for size, variant in self._list_wanted():
            self._try(size, variant)
        self._captures_more = False
        if self._problems:
            text = "%d of %d CUDA graphs were captured; steps that fit none run without, more slowly. First problem: %s"
            problem = next(iter(self._problems.values()))
            logger.warning(text, len(self._graphs), len(self._list_wanted()), problem)
        logger.info("%s graphs captured in %.1f s, %.0f MiB.", self.describe_count(), *self._measure_costs())

    def describe_count(self) -> str:
        """How many graphs there are, of those wanted: "52 of 52"."""
        return f"{len(self._graphs)} of {len(self._list_wanted())}"

    def run(self, step: DecodeStep) -> tuple[Tensor, DrawMemory] | None:
        """Logits [n, V] and draws of n sequences, valid until the next call; None if no graph fits.

        If `step.draws` is None the draws are meaningless.
        """
        if self._last_tokens is not self._rows.last_tokens:
            self.void()
        if step.adapters is not None:
            self._void_adapters()
        count = len(step.flat.rows)
        found = self._fitting(count, Variant(step.prefixes is not None, step.adapters is not None))
        if found is None:
            return None
        size, variant = found
        self._inputs.put(step if variant.has_prefixes else step._replace(prefixes=None), size)
        self._replay(found)
        assert self._logits is not None, "graphs write it"
        return self._logits[:count], self._drawn.rows(count)

    def _replay(self, key: tuple[int, Variant]) -> None:
        self._graphs[key].replay()

    def draws(self, count: int) -> DrawColumns[Tensor]:
        """The columns of the last draws from `count` sequences."""
        return self._inputs.draws(count)

    def _list_wanted(self) -> list[tuple[int, Variant]]:
        """Graphs that are captured at load."""
        return [(size, Variant(each, False)) for size in reversed(self._sizes) for each in self._has_prefixes]

    def _void_adapters(self) -> None:
        """Drop graphs with adapters if other layers have adapters than at their capture."""
        adapters = self._model.adapters
        assert adapters is not None, "rows have some"
        if (layout := adapters.layout) == self._adapted_groups:
            return
        self._adapted_groups = layout
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1].has_adapters}
        self._problems = {key: text for key, text in self._problems.items() if not key[1].has_adapters}
        for variant in [each for each in self._captured if each.has_adapters]:
            del self._captured[variant]

    def _measure_costs(self) -> tuple[float, float]:
        """Seconds and MiB of the captures so far."""
        return self._num_seconds, self._num_bytes / 2**20

    def _logits_memory(self) -> Tensor:
        weight, decoder = next(self._model.module.parameters()), self._model.decoder
        assert decoder is not None, "modules are not captured"
        return weight.new_empty(self._sizes[-1], decoder.vocab_size)

    def _fitting(self, count: int, wanted: Variant) -> tuple[int, Variant] | None:
        """Size and variant of the smallest graph for `count` sequences, with prefixes if they are wanted.

        The first step that needs a graph captures it. Without it a larger one serves, or one without prefixes.
        """
        place = bisect_left(self._sizes, count)
        for has_prefixes in (True, False) if wanted.has_prefixes else (False,):
            variant = Variant(has_prefixes, wanted.has_adapters)
            if (self._captures_more or variant.has_adapters) and place < len(self._sizes):
                self._capture_for_step(self._sizes[place], variant)
            captured = self._captured[variant]
            if (index := bisect_left(captured, count)) < len(captured):
                return captured[index], variant
        return None

    def _capture_for_step(self, size: int, variant: Variant) -> None:
        key, is_first = (size, variant), not self._problems
        if key in self._graphs or key in self._problems:
            return
        self._try(size, variant)
        if is_first and key in self._problems:
            text = "A CUDA graph was not captured; steps that fit no other run without, more slowly: %s"
            logger.warning(text, self._problems[key])

    def _try(self, size: int, variant: Variant) -> None:
        """Capture a graph, unless time or memory have run out, or there is no room for it.

        A failed capture is the last one: torch before 2.13 keeps counting it as under way. Graphs for which there is
        no room are left out before they are begun.
        """
        if not self._may_capture():
            return
        started, before = time.perf_counter(), _free_bytes()
        try:
            if self._logits is None:
                self._logits = self._logits_memory()
                self._capture = self._capture or GraphPool(self._all_agree).capture
            self._graphs[size, variant] = self._capture_one(size, variant)
            insort(self._captured[variant], size)
        except NoRoomForGraph as problem:  # a smaller one may fit
            self._problems[size, variant] = f"for {size} sequences: {problem}"
        except Exception as problem:
            self._note_failure((size, variant), problem)
        self._num_seconds += time.perf_counter() - started
        self._num_bytes += max(0, before - _free_bytes())

    def _may_capture(self) -> bool:
        return not self._has_failed and self._num_seconds <= _SECONDS and self._num_bytes <= _BYTES

    def _note_failure(self, key: tuple[int, Variant], problem: Exception) -> None:
        """Continue after a failed capture: steps can run without any graph."""
        self._problems[key] = f"{type(problem).__name__}: {problem}"
        self._has_failed = True

    def _all_agree(self, condition: bool) -> bool:
        """Whether a condition holds everywhere."""
        return condition

    def _capture_one(self, size: int, variant: Variant) -> Captured:
        assert self._capture is not None, "the first capture makes a pool"
        self._inputs.clear()
        return self._capture(self._computation(size, variant))

    def _computation(self, size: int, variant: Variant) -> Callable[[], None]:
        batch, draws = self._inputs.batch(size, **variant._asdict()), self._inputs.draws(size)
        drawn, model, last_tokens = self._drawn.rows(size), self._model, self._last_tokens
        decoder, logits = model.decoder, self._logits
        assert decoder is not None and logits is not None, "modules are not captured"
        out = logits[:size]

        def compute() -> None:
            model.attention.plan(batch.attention)
            decoder.write_logits(batch, model.kv, out)
            draw_plainly(out, draws, drawn, last_tokens)

        return compute


def _ladder(max_batch: int) -> list[int]:
    """Batch sizes 1, 2, 4, 8, then every 16th, from 256 on every 32nd, and `max_batch` itself."""
    steps = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_batch, 32)]
    return [size for size in steps if size < max_batch] + [max_batch]


def graph_bytes(max_batch: int, vocab_size: int, itemsize: int) -> int:
    """Bytes to leave for all graphs: their logits, and an estimate of the rest, which is bounded as captures are."""
    return min(_BYTES, max_batch * vocab_size * itemsize + _NODES_BYTES)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
