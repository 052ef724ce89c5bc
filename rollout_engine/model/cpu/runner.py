"""Turns one `SchedulerOutput` into tokens: runs the flat batch through the model, then the sampler.

The tokens and block tables of live sequences are kept between steps, so that a step carries only changes.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from rollout_engine.base.messages import KVSave, ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput
from rollout_engine.grammars.compiler import GrammarCompiler
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.cpu.attention import ChunkColumns
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.cpu.routing import RoutingRecorder
from rollout_engine.model.pictures.step_inputs import PictureInputs, SequencesWithPictures
from rollout_engine.model.pooling.pooler import Pooler
from rollout_engine.model.ranks.seat import Seat, lead, preparing
from rollout_engine.model.sampling.asked_rows import AskedRows
from rollout_engine.model.sampling.draft_draws import DraftTask, Row, draw_behind_drafts
from rollout_engine.model.sampling.draw_pieces import sample_rows
from rollout_engine.model.sampling.hidden_states import StateRecorder
from rollout_engine.model.sampling.logit_rows import LogitRows
from rollout_engine.model.sampling.logits_processors import LogitsProcessor
from rollout_engine.model.sampling.prompt_logprobs import PromptScorer
from rollout_engine.model.sampling.row_edits import RowEdits
from rollout_engine.model.sampling.sampling_batch import SamplingBatch
from rollout_engine.model.sequences.block_tables import BlockTableMatrix
from rollout_engine.model.sequences.kv_transfer import KVTransfer
from rollout_engine.model.sequences.sequence_states import SequenceStates
from rollout_engine.model.sequences.state_slots import StateSlots


class CpuRunner:
    """The model, its pools of KV and states, and the sequences they work on."""

    def __init__(
        self,
        model: CpuModel,
        *,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        pooler: Pooler | None = None,
        grammars: GrammarCompiler | None = None,
        seat: Seat | None = None,
        pictures: SequencesWithPictures | None = None,
    ) -> None:
        """`seat`: of the rank, if the model is cut over ranks. `pictures`: None if the model takes none."""
        self.model, self._seat, self.pictures = model, seat, pictures
        self._pooler = pooler
        self._vocab_size = vocab_size
        self._prompts = PromptScorer(vocab_size)
        self._sequences = SequenceStates(vocab_size, processors, self._prompts, grammars)
        self._blocks = BlockTableMatrix()
        self._state_slots: StateSlots | None = None if model.kv.states.is_empty else StateSlots()
        """Slots of sequences; None: the model keeps no states."""
        self.routing = RoutingRecorder(model)
        self._states = StateRecorder()
        self._logits: LogitRows | None = None
        """Logits that the step that was followed last has left."""
        self._computed = _Computed([], [], np.empty(0, np.int64))
        """Tokens and block tables of the last step's sequences; kept while steps compute the same ones."""
        self._transfer: KVTransfer | None = None
        """Moves KV to and from a connector; None: there is none."""
        self._drawn: _Drawn | None = None
        """Sampling columns of the last step's draws; kept while steps draw for the same sequences."""

    @property
    def num_sequences(self) -> int:
        """Sequences whose state is held; 0 when idle."""
        return len(self._sequences)

    def block_tables(self) -> dict[int, list[int]]:
        """Sequence id -> KV blocks, of every sequence whose state is held."""
        return self._blocks.tables()

    def open_transfer(self, save: Callable[[bytes, memoryview], None]) -> KVTransfer:
        """From now on, hand the KV that steps are to save to `save`. Call it before the first step."""
        self.routing.keep()
        self._transfer = KVTransfer(self.model.kv, save)
        return self._transfer

    def save_kv(self, saves: list[KVSave]) -> None:
        """Hand blocks of KV and states on, between two steps."""
        assert self._transfer is not None, "KV is saved for a connector alone"
        self._transfer.save(saves)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and draw one token per sample task."""
        with preparing(self._seat, work):
            batch, asked = self._prepare(work)
            pictures = self._picture_inputs(work, batch)  # if a picture cannot be encoded, the other ranks do nothing
        with lead(self._seat, lambda followers: followers.step(work, batch.token_ids)):
            logits, pooled = self._forward(work, batch, asked.logit_rows, pictures)
        if self._seat is not None:
            logits.around = self._seat.lead_logits
        if self._prompts.has_pieces:
            prompt_logprobs = self._prompts.score(logits.take(slice(asked.num_drawn, None)))()
        else:
            prompt_logprobs = {}
        num_encoded = 0 if pictures is None else pictures.num_encoded
        if not work.samples:
            out = ModelRunnerOutput(token_ids=[], logprobs=None, pooled=pooled, num_encoded_pictures=num_encoded)
            self._states.add_to(out)  # parts of prompts
            return out
        if _has_drafts(work, batch):
            out = self._sample_drafts(logits, work, asked.drawn_rows.tolist())
        else:
            if asked.num_drawn < len(work.samples):
                logits = logits.at(torch.from_numpy(asked.drawn_rows))
            out = self._sample(logits, [task.sequence_id for task in work.samples])
        out.prompt_logprobs, out.pooled, out.num_encoded_pictures = prompt_logprobs, pooled, num_encoded
        self.routing.add_to(out, work, batch)
        self._states.add_to(out)
        return out

    def follow(self, work: SchedulerOutput, token_ids: np.ndarray) -> None:
        """Compute the step that rank 0 executes now, up to its logits, on another rank.

        `token_ids`: int64 [T], those of the flat batch: only rank 0 has the tokens it has drawn.
        """
        batch, asked = self._prepare(work, token_ids)
        logits, _ = self._forward(work, batch, asked.logit_rows, self._picture_inputs(work, batch))
        self._logits = logits if logits.are_left else None

    def take_logits(self, rows: list[int]) -> None:
        """Compute rows of the logits of the step that was followed last, as rank 0 does now."""
        assert self._logits is not None, "rank 0 has left them, too"
        self._logits.compute(torch.tensor(rows, dtype=torch.int64))

    def _prepare(self, work: SchedulerOutput, token_ids: np.ndarray | None = None) -> tuple[FlatBatch, AskedRows]:
        """Record the changes of a step; returns its flat batch, of `token_ids` if given, and the rows asked for."""
        self._note_changes(work)
        batch = self._flat_batch(work.scheduled, token_ids)
        num_drafted = None
        if _has_drafts(work, batch):
            num_drafted = np.array([len(chunk.draft_token_ids) for chunk in work.scheduled], np.int64)
        chunks, prompt_rows = [task.row for task in work.samples], self._prompts.rows(work.scheduled)
        return batch, AskedRows.of(chunks, batch.columns.token_starts, num_drafted, prompt_rows)

    def _forward(
        self, work: SchedulerOutput, batch: FlatBatch, logit_rows: np.ndarray, pictures: PictureInputs | None
    ) -> tuple[LogitRows, dict[int, np.ndarray]]:
        """Logits of a step, and the results of prompts that are pooled."""
        if self._transfer is not None:
            self._transfer.save(work.kv_saves)
            self._transfer.load(work.kv_loads)
        self.model.kv.copy_blocks(work.block_copies)
        if not work.scheduled:
            return LogitRows.of(torch.empty(0)), {}
        if self.model.passes_on:
            with self.routing.step(work, batch):
                self.model.pass_on(batch, self._adapter_rows(work.scheduled))
            return LogitRows.of(torch.empty(0)), {}
        pooled_rows = self._pooler.rows(work.scheduled) if self._pooler else ()
        state_rows = [*pooled_rows, *self._states.rows(work, batch.columns.token_starts)]
        with self.routing.step(work, batch):
            adapter_rows = self._adapter_rows(work.scheduled)
            logits, states = self.model.forward_states(batch, logit_rows, state_rows, adapter_rows, pictures)
        self._states.take(states[len(pooled_rows) :])
        return logits, self._pooler.pool(states[: len(pooled_rows)]) if self._pooler else {}

    def _picture_inputs(self, work: SchedulerOutput, batch: FlatBatch) -> PictureInputs | None:
        if self.pictures is None:
            return None
        return self.pictures.inputs(work.scheduled, batch.columns.token_starts)

    def _note_changes(self, work: SchedulerOutput) -> None:
        if work.finished_sequence_ids or work.new:
            self._computed, self._drawn = _Computed([], [], np.empty(0, np.int64)), None
        self._sequences.begin_step(work)
        self.routing.update(work)
        self._states.update(work)
        if self._pooler is not None:
            self._pooler.update(work)
        for sequence_id in work.finished_sequence_ids:
            self._blocks.forget(sequence_id)
        if self._state_slots is not None:
            self._state_slots.forget(work.finished_sequence_ids)
        self._blocks.add(new.sequence_id for new in work.new)
        self._blocks.extend(work.scheduled)
        if self.pictures is not None:
            self.pictures.update(work)

    def _flat_batch(self, scheduled: list[ScheduledSequence], token_ids: np.ndarray | None) -> FlatBatch:
        first = [chunk.num_computed_tokens for chunk in scheduled]
        sizes = [chunk.num_scheduled_tokens for chunk in scheduled]
        _, tokens, rows = self._chunk_sequences([chunk.sequence_id for chunk in scheduled])
        if token_ids is None:
            token_ids = _tokens_of(scheduled, tokens, are_single=not sizes or max(sizes) == 1)
        columns = ChunkColumns(
            first_positions=np.array(first, np.int64),
            token_starts=np.array([0, *accumulate(sizes)], np.int64),
            blocks=self._blocks.matrix,
            block_starts=rows * self._blocks.matrix.shape[1],
        )
        slots = self._state_slots
        states = None if slots is None else slots.chunks(scheduled, columns.token_starts)
        return FlatBatch(token_ids, columns, states=states)

    def _chunk_sequences(self, sequence_ids: list[int]) -> "_Computed":
        """Tokens and block tables of these sequences."""
        if self._computed.sequence_ids != sequence_ids:
            tokens = [self._sequences[sequence_id].token_ids for sequence_id in sequence_ids]
            self._computed = _Computed(sequence_ids, tokens, self._blocks.rows(sequence_ids))
        return self._computed

    def _adapter_rows(self, scheduled: list[ScheduledSequence]) -> AdapterRows | None:
        adapters = self.model.adapters
        if adapters is None or adapters.is_empty:
            return None
        slots = [self._sequences[chunk.sequence_id].adapter_slot for chunk in scheduled]
        return adapters.rows(slots, [chunk.num_scheduled_tokens for chunk in scheduled])

    def _sample(self, logits: LogitRows, sequence_ids: list[int]) -> ModelRunnerOutput:
        if self._drawn is None or self._drawn.sequence_ids != sequence_ids:
            sequences = [self._sequences[sequence_id] for sequence_id in sequence_ids]
            params, seeds = [s.params for s in sequences], [s.seed for s in sequences]
            settings = SamplingBatch.from_tasks(params, seeds=seeds, positions=[0] * len(sequences))
            self._drawn = _Drawn(sequence_ids, sequences, [s.token_ids for s in sequences], settings, RowEdits())
        _, sequences, tokens, batch, edits = self._drawn
        positions = [len(ids) for ids in tokens]
        batch.positions = np.array(positions, np.int64)
        if not edits.lasts:
            edits = self._sequences.edits_of(sequences, positions)
            self._drawn = self._drawn._replace(edits=edits)
        out = sample_rows(logits, batch, edits, self._vocab_size)
        for ids, token in zip(tokens, out.token_ids, strict=True):
            ids.append(token if token >= 0 else 0)  # after a failure the next step may be on its way already
        return out

    def _sample_drafts(self, logits: LogitRows, work: SchedulerOutput, first_rows: list[int]) -> ModelRunnerOutput:
        """Draw behind drafted tokens; `first_rows`: of each sample, its first of `logits`."""
        sequences = [self._sequences[task.sequence_id] for task in work.samples]
        edits = self._sequences.edits_of(sequences, [len(sequence.token_ids) for sequence in sequences])
        rows = zip(work.samples, sequences, first_rows, strict=True)
        tasks = [
            DraftTask(
                sequence,
                row,
                work.scheduled[task.row].draft_token_ids,
                one_by_one=index in edits and edits[index].sees_drawn_tokens_alone,
            )
            for index, (task, sequence, row) in enumerate(rows)
        ]

        def draw(rows: list[Row]) -> ModelRunnerOutput:
            of, positions = [row.sequence for row in rows], [row.position for row in rows]
            batch = SamplingBatch.from_tasks([s.params for s in of], seeds=[s.seed for s in of], positions=positions)
            places = torch.tensor([row.row for row in rows])
            edits = self._sequences.edits_of(of, positions)
            behind = {i: each.behind(rows[i].drafted) if rows[i].drafted else each for i, each in edits.items()}
            active = RowEdits({i: each for i, each in behind.items() if each.are_active})
            return sample_rows(logits.at(places), batch, active, self._vocab_size)

        return draw_behind_drafts(tasks, draw)


def _has_drafts(work: SchedulerOutput, batch: FlatBatch) -> bool:
    """Whether tokens were drafted; a step of one token a sequence has none."""
    return len(batch.token_ids) > len(work.scheduled) and any(chunk.draft_token_ids for chunk in work.scheduled)


def _tokens_of(scheduled: list[ScheduledSequence], tokens: list[list[int]], *, are_single: bool) -> np.ndarray:
    """The tokens of chunks, int64 [T], from those of their sequences. `are_single`: each chunk is one token."""
    if are_single:
        found = [ids[chunk.num_computed_tokens] for ids, chunk in zip(tokens, scheduled, strict=True)]
    else:
        found = []
        for ids, chunk in zip(tokens, scheduled, strict=True):
            start = chunk.num_computed_tokens
            found += ids[start : start + chunk.num_scheduled_tokens]
            found += chunk.draft_token_ids
    return np.array(found, np.int64)


class _Computed(NamedTuple):
    """The sequences of a step's chunks."""

    sequence_ids: list[int]
    token_ids: list[list[int]]
    """The lists that grow with the sequences."""
    rows: np.ndarray
    """int64: rows of their block tables in the matrix."""


class _Drawn(NamedTuple):
    """The sequences that a step draws for."""

    sequence_ids: list[int]
    sequences: list[NewSequence]
    token_ids: list[list[int]]
    settings: SamplingBatch
    """Sampling columns; the positions change with every step."""
    edits: RowEdits
    """Edits of the last step's rows, which serve the next step too if they last."""
