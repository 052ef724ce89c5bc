"""Turns `SchedulerOutput`s into tokens on a device, which computes while the host prepares the next step.

    host      columns of the step ──upload──>   ...                                   <──download── tokens, log-probs
    device    state of sequences  ──gather──>   batch ── forward ── draw ──> tokens ──scatter──> state of sequences

A drawn token stays on the device and feeds the next step; the host reads it when it asks for the result. Rows that
logits processors edit are drawn on the host, which waits for them; so it does for steps with drafted tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.errors import StepMemoryError
from rollout_engine.base.messages import (
    KVSave,
    ModelRunnerOutput,
    PromptLogprobs,
    ScheduledSequence,
    SchedulerOutput,
)
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.triton.adapters import AdapterBatch
from rollout_engine.kernels.triton.paged_attention import Batch, Prefixes
from rollout_engine.kernels.triton.sampling import score
from rollout_engine.kernels.triton.shared_prefix import SharedPrefixes, shared_prefixes
from rollout_engine.model.cuda.attention import CudaBatch
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs
from rollout_engine.model.cuda.decode_inputs import DecodeStep
from rollout_engine.model.cuda.drawing import Drawing
from rollout_engine.model.cuda.draws import CudaDraws, Draws
from rollout_engine.model.cuda.flat_columns import FlatColumns, decodes_first
from rollout_engine.model.cuda.host_draws import draw_rows
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.cuda.routing import Fill, RoutingRecorder
from rollout_engine.model.cuda.sampler import DrawMemory, to_output
from rollout_engine.model.cuda.sequence_rows import SequenceRows, TableChanges
from rollout_engine.model.cuda.upload import Download, upload
from rollout_engine.model.ranks.group_exchange import GroupExchange
from rollout_engine.model.ranks.seat import Seat, lead, preparing
from rollout_engine.model.sampling.asked_rows import AskedRows
from rollout_engine.model.sampling.logit_rows import LogitRows
from rollout_engine.model.sampling.logits_processors import LogitsProcessor
from rollout_engine.model.sampling.prompt_logprobs import PromptScorer
from rollout_engine.model.sequences.kv_transfer import KVTransfer, save_behind
from rollout_engine.model.sequences.sequence_states import SequenceStates
from rollout_engine.model.sequences.state_slots import StateSlots

Result = Callable[[], ModelRunnerOutput]
_PromptResult = Callable[[], dict[int, PromptLogprobs]]


class CudaRunner:
    """The model, its pools of KV and states, and the sequences they work on."""

    def __init__(
        self,
        model: CudaModel,
        *,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        shares_prefixes: bool = True,
        grammars: GrammarCompiler | None = None,
        seat: Seat | None = None,
    ) -> None:
        """`seat`: of the rank, if the model is cut over ranks."""
        self.model, self._seat = model, seat
        self.num_ranks = 1 if seat is None else seat.num_ranks
        self.graphs: DecodeGraphs | None = None
        """Graphs for decode-only steps, if there are any."""
        self._vocab_size = vocab_size
        self._prompts = PromptScorer(vocab_size, score, lambda figures: Download(figures).wait)
        self._sequences = SequenceStates(vocab_size, processors, self._prompts, grammars)
        self._state_slots: StateSlots | None = None if model.kv.states.is_empty else StateSlots()
        """Slots of sequences; None: the model keeps no states."""
        size = model.kv.block_size
        self.rows = SequenceRows(-(-model.limits.context // size), model.device)
        self.drawing = Drawing(self._sequences, self.rows, vocab_size=vocab_size, context=model.limits.context)
        self._prefix_shape = model.attention.prefix_shape if shares_prefixes else None
        self._routing = None if model.kv.routed is None else RoutingRecorder(model.kv)
        self._pending: deque[_Pending] = deque()
        self._transfer: KVTransfer | None = None
        """Moves KV to and from a connector; None: there is none."""
        self._saving: Callable[[], None] | None = None
        """Hands on the KV that the step being launched saves."""
        self._logits: LogitRows | None = None
        """Logits that the step that was followed last has left."""

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is held; 0 when idle."""
        return len(self._sequences)

    @property
    def shared_unit(self) -> int | None:
        """KV positions by which prefixes are read once for all that share them; None if none are."""
        return None if self._prefix_shape is None else self._prefix_shape[0]

    def block_tables(self) -> dict[int, list[int]]:
        """Sequence id -> KV blocks, of every sequence whose state is held."""
        return self.rows.tables()

    @torch.inference_mode()
    def submit(self, work: SchedulerOutput) -> Result:
        """Launch `work` after all earlier steps; returns a function that waits for its result, or raises its error."""
        self._saving = None
        try:
            result = self._launch(work)
        except Exception as problem:  # raised when the result is asked for
            return _raiser(_reword_error(problem))
        return result if self._saving is None else partial(save_behind, result, self._saving)

    def open_transfer(self, save: Callable[[bytes, memoryview], None]) -> KVTransfer:
        """From now on, hand the KV that steps are to save to `save`. Call it before the first step."""
        self._transfer = KVTransfer(self.model.kv, save)
        return self._transfer

    @torch.inference_mode()
    def save_kv(self, saves: list[KVSave]) -> None:
        """Hand blocks of KV and states on, between two steps."""
        assert self._transfer is not None, "KV is saved for a connector alone"
        self._transfer.save(saves)

    def catch_up(self) -> None:
        """Wait for every result that has not been asked for yet."""
        while self._pending:
            self._pending[0].settle(self._pending)

    @torch.inference_mode()
    def follow(self, work: SchedulerOutput, token_ids: np.ndarray) -> None:
        """Launch the step that rank 0 submits now, up to its logits, on another rank.

        `token_ids`: int64 [T], those of rank 0's `FlatColumns`.
        """
        computed = self._run(work, self._prepare(work, token_ids))
        self._logits = computed.logits if computed is not None and computed.logits.are_left else None

    def take_logits(self, rows: list[int]) -> None:
        """Compute rows of the logits of the step that was followed last, as rank 0 does now."""
        assert self._logits is not None, "rank 0 has left them, too"
        self._logits.compute(torch.tensor(rows, dtype=torch.int64, device=self.model.device))

    def _launch(self, work: SchedulerOutput) -> Result:
        with preparing(self._seat, work):
            step = self._prepare(work)
        token_ids = np.empty(0, np.int64) if step is None else step.flat.token_ids
        with lead(self._seat, lambda followers: followers.step(work, token_ids)):
            computed = self._run(work, step)
        if step is None or computed is None:
            return lambda: ModelRunnerOutput(token_ids=[], logprobs=None)
        flat, asked, draws = step.flat, step.asked, step.draws
        logits, drawn_rows, columns, drawn = computed
        if self._seat is not None:
            logits.around = self._seat.lead_logits
        prompt_logprobs = self._score_prompts(logits.take(slice(asked.num_drawn, None)), step.order)
        if draws is None or columns is None:
            return self._draw_behind_drafts(work, logits, step, prompt_logprobs)
        if not work.samples:
            return lambda: ModelRunnerOutput(token_ids=[], logprobs=None, prompt_logprobs=prompt_logprobs())
        if drawn_rows is not None and asked.num_drawn < len(work.samples):
            logits = logits.at(drawn_rows)
        outcome = self.drawing.launch(logits, draws, columns, drawn)
        told = _Told(prompt_logprobs, self._fetch_routed(work, flat, asked.flat_rows))
        pending = _Pending(draws, Download(outcome), told)
        if draws.on_host:
            return self._draw_on_host(pending, logits)
        self._pending.append(pending)
        return lambda: pending.settle(self._pending)

    def _prepare(self, work: SchedulerOutput, token_ids: np.ndarray | None = None) -> "_Step | None":
        """Record a step's changes; returns it on the host, of `token_ids` if given; None if it computes nothing."""
        changes = self._note_changes(work)
        if not work.scheduled:
            return None
        order = decodes_first(work.scheduled)
        scheduled = [work.scheduled[index] for index in order]
        rows = self.rows.rows([chunk.sequence_id for chunk in scheduled])
        flat = FlatColumns.of(scheduled, self._sequences, rows, self.rows.matrix, self.model.kv.block_size)
        if token_ids is not None:
            flat = flat._replace(token_ids=token_ids)
        place_of = {index: place for place, index in enumerate(order)}
        chunks = [place_of[task.row] for task in work.samples]
        num_drafted = np.array([len(chunk.draft_token_ids) for chunk in scheduled], np.int64)
        asked = AskedRows.of(chunks, flat.token_starts, num_drafted, self._prompts.rows(scheduled))
        draws = None if num_drafted.any() else self.drawing.of(work, flat.context_lens[chunks].astype(np.int64))
        slots = self._state_slots
        states = None if slots is None else slots.chunks(scheduled, flat.token_starts)
        return _Step(flat, asked, draws, self._prefixes(flat), changes, self._adapter_rows(scheduled), order, states)

    def _run(self, work: SchedulerOutput, step: "_Step | None") -> "_Computed | None":
        """Launch a step up to its logits. All ranks do so together, over the tokens that rank 0 has drawn."""
        if step is None and not (work.block_copies or work.kv_saves):  # released memory stays released
            return None
        if self.model.kv.memory.restore() and self.graphs is not None:
            self.graphs.void()
        if self._transfer is not None and (work.kv_saves or work.kv_loads):
            self._saving = self._transfer.begin_saves(work.kv_saves) if work.kv_saves else None
            self._transfer.load(work.kv_loads)
        self.model.kv.copy_blocks(work.block_copies)
        if step is None:
            return None
        if self._seat is not None:
            cast(GroupExchange, self._seat.exchange).copy_from_first(self.rows.last_tokens[: len(self.rows.matrix)])
        return self._replay(step) or self._compute(step)

    def _note_changes(self, work: SchedulerOutput) -> TableChanges:
        self._sequences.begin_step(work)
        for sequence_id in work.finished_sequence_ids:
            self.rows.forget(sequence_id)
        if self._state_slots is not None:
            self._state_slots.forget(work.finished_sequence_ids)
        self.drawing.update(work)
        if self._routing is not None:
            self._routing.update(work)
        self.rows.add(new.sequence_id for new in work.new)
        return self.rows.learn(work.scheduled)

    def _replay(self, step: "_Step") -> "_Computed | None":
        """Run the step by a graph, if one fits: one upload, one launch and the replay; special draws upload apart."""
        flat, asked, draws = step.flat, step.asked, step.draws
        if self.graphs is None or flat.num_decodes < len(flat.rows) or not self.model.runs_fused or draws is None:
            return None
        in_order = asked.takes_all_in_order(len(flat.rows))
        plain = draws.plain if in_order else None
        found = self.graphs.run(DecodeStep(flat, plain, step.prefixes, step.changes, step.adapters, step.states))
        if found is None:
            return None
        logits, drawn = found
        if in_order:
            more = upload(draws.more, self.model.device) if draws.more else []
            columns = CudaDraws.of(draws, [*self.graphs.draws(len(logits)).flat, *more])
            return _Computed(LogitRows.of(logits), None, columns, drawn)
        sent = [asked.logit_rows, asked.drawn_rows, *draws.sent]
        logit_rows, drawn_rows, *arrived = upload(sent, self.model.device)
        return _Computed(LogitRows.of(logits[logit_rows]), drawn_rows, CudaDraws.of(draws, arrived), None)

    def _compute(self, step: "_Step") -> "_Computed":
        flat, asked, draws, prefixes, _, plan, _, states = step
        adapters = [] if plan is None else [plan.rows, plan.blocks]
        shared = [] if prefixes is None else [prefixes.items, prefixes.units, prefixes.num_items]
        of_draws = [] if draws is None else [asked.drawn_rows, *draws.sent]
        columns = [*step.changes, *flat[:-1], asked.logit_rows, *shared, *adapters, *of_draws]
        arrived = iter(upload(columns, self.model.device))
        self.rows.write(next(arrived), next(arrived))
        token_ids, positions, slots, token_rows, starts, lens, rows = islice(arrived, len(flat) - 1)
        logit_rows = next(arrived)
        token_ids = torch.where(token_ids < 0, self.rows.last_tokens[token_rows], token_ids)
        found = Prefixes(*islice(arrived, len(shared))) if shared else None
        added = AdapterBatch(*islice(arrived, len(adapters))) if adapters else None
        attention = Batch(starts, lens, self.rows.tables_on_device[rows], flat.num_decodes, found)
        batch = CudaBatch(token_ids, positions, slots, attention, added, states=states)
        logits = self.model.forward_rows(batch, logit_rows)
        if draws is None:
            return _Computed(logits, None, None, None)
        return _Computed(logits, next(arrived), CudaDraws.of(draws, list(arrived)), None)

    def _prefixes(self, flat: FlatColumns) -> SharedPrefixes | None:
        count = flat.num_decodes
        if self._prefix_shape is None or count < 2:
            return None
        unit, tokens_per_item = self._prefix_shape
        found = shared_prefixes(
            self.rows.matrix[flat.rows[:count]],
            flat.context_lens[:count],
            block_size=self.model.kv.block_size,
            unit=unit,
            tokens_per_item=tokens_per_item,
        )
        return found if len(found.items) else None

    def _adapter_rows(self, scheduled: list[ScheduledSequence]) -> AdapterRows | None:
        adapters = self.model.adapters
        if adapters is None or adapters.is_empty:
            return None
        slots = [self._sequences[chunk.sequence_id].adapter_slot for chunk in scheduled]
        return adapters.rows(slots, [chunk.num_scheduled_tokens for chunk in scheduled])

    def _score_prompts(self, logits: Tensor, order: list[int]) -> _PromptResult:
        finish = self._prompts.score(logits)
        return lambda: {order[index]: logprobs for index, logprobs in finish().items()}

    def _fetch_routed(self, work: SchedulerOutput, flat: FlatColumns, drawn: np.ndarray) -> Fill | None:
        """Start to fetch routed experts, if some are asked for; `drawn`: int64, rows behind which tokens are drawn."""
        if self._routing is None or not self._routing.are_asked_for(work):
            return None
        return self._routing.fetch(work, flat.slots[drawn], lambda key: self.rows.matrix[self.rows.rows([key])[0]])

    def _draw_on_host(self, pending: "_Pending", logits: LogitRows) -> Result:
        """Wait for all earlier results, then replace the device's draws by those of the host."""
        self.catch_up()
        draws = pending.draws
        out = pending.arrive(lambda out: draw_rows(out, draws, logits, self._vocab_size))
        rows = list(draws.on_host)
        self.drawing.put_last_tokens(
            [draws.sequences[row] for row in rows], [max(out.token_ids[row], 0) for row in rows]
        )
        return lambda: out

    def _draw_behind_drafts(
        self, work: SchedulerOutput, logits: LogitRows, step: "_Step", prompt_logprobs: _PromptResult
    ) -> Result:
        """Draw and wait: only when the host has the right drafts can it prepare the next step."""
        assert not self._pending, "no step is scheduled ahead where tokens are drafted"
        out = self.drawing.behind_drafts(work, logits, step.asked.drawn_rows)
        pairs = zip(step.asked.flat_rows, out.num_drawn or [1] * len(work.samples), strict=True)
        drawn = [np.empty(0, np.int64), *(first + np.arange(num) for first, num in pairs)]
        _Told(prompt_logprobs, self._fetch_routed(work, step.flat, np.concatenate(drawn))).add_to(out)
        return lambda: out


class _Step(NamedTuple):
    """A step on the host."""

    flat: FlatColumns
    asked: AskedRows
    draws: Draws | None
    """None: tokens were drafted, and the draws depend on which are right."""
    prefixes: SharedPrefixes | None
    changes: TableChanges
    adapters: AdapterRows | None
    order: list[int]
    """Indices into `scheduled` of the chunks of `flat`."""
    states: StateChunks | None
    """None: no layer keeps states."""


class _Computed(NamedTuple):
    """Logits of the rows that were asked for, and the draws from them."""

    logits: LogitRows
    drawn_rows: Tensor | None
    """int64 [S], as in `AskedRows`; None: all rows in order."""
    draws: CudaDraws | None
    drawn: DrawMemory | None


class _Told(NamedTuple):
    """Prompt log-probs and routed experts of a result, on their way to the host."""

    prompt_logprobs: _PromptResult
    routed: Fill | None
    """Fills in routed experts; None if none are asked for."""

    def add_to(self, out: ModelRunnerOutput) -> None:
        """Wait for both, and add them to the result."""
        out.prompt_logprobs = self.prompt_logprobs()
        if self.routed is not None:
            self.routed(out)


class _Pending:
    """A result on its way to the host."""

    def __init__(self, draws: Draws, download: Download, told: _Told) -> None:
        self.draws, self._download, self._told = draws, download, told
        self._out: ModelRunnerOutput | None = None

    def settle(self, queue: deque["_Pending"]) -> ModelRunnerOutput:
        """Wait for this result and all earlier ones, and dequeue them."""
        while self._out is None:
            queue[0].arrive()
            queue.popleft()
        return self._out

    def arrive(self, change: Callable[[ModelRunnerOutput], None] | None = None) -> ModelRunnerOutput:
        """Wait, let `change` edit the result, and append the tokens to their sequences."""
        out = to_output(self.draws, self._download.wait())
        self._told.add_to(out)
        if change is not None:
            change(out)
        for sequence, token in zip(self.draws.sequences, out.token_ids, strict=True):
            sequence.token_ids.append(max(token, 0))  # after a failure the next step may be on its way already
        self._out = out
        return out


def _raiser(problem: Exception) -> Result:
    def fail() -> ModelRunnerOutput:
        raise problem

    return fail


def _reword_error(problem: Exception) -> Exception:
    if not isinstance(problem, torch.OutOfMemoryError):
        return problem
    torch.cuda.empty_cache()
    advice = "Lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or stop what else uses the device."
    worded = StepMemoryError(f"The device ran out of memory in this step ({problem}). {advice}")
    worded.__cause__ = problem
    return worded
