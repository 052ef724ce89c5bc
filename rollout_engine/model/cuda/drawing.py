"""Prepares the draws of a runner's steps on the host and launches them on the device."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput, NewSequence, SchedulerOutput
from rollout_engine.model.cuda.draws import CudaDraws, Draws, DrawSettings, columns_of, special_columns
from rollout_engine.model.cuda.edit_records import EditRecords
from rollout_engine.model.cuda.host_draws import draw_rows
from rollout_engine.model.cuda.sampler import CudaSampler, DrawMemory, to_output
from rollout_engine.model.cuda.sequence_rows import SequenceRows
from rollout_engine.model.cuda.upload import Download, upload
from rollout_engine.model.sampling.draft_draws import DraftTask, Row, draw_behind_drafts
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.logit_rows import LogitRows, row_pieces
from rollout_engine.model.sampling.sampling_batch import SamplingBatch
from rollout_engine.model.sequences.sequence_states import SequenceStates


class Drawing:
    """Draws tokens for `sequences`; `rows` has their last tokens on the device."""

    def __init__(self, sequences: SequenceStates, rows: SequenceRows, *, vocab_size: int, context: int) -> None:
        """`context`: most tokens of a sequence."""
        self._sequences, self._rows, self._vocab_size = sequences, rows, vocab_size
        self._device = rows.tables_on_device.device
        self._records = EditRecords(vocab_size, context, self._device)
        self.sampler = CudaSampler(vocab_size, self._device)
        self._settings: DrawSettings | None = None
        """Settings of the last step's draws."""

    def update(self, work: SchedulerOutput) -> None:
        """Drop the settings and records of finished sequences, and of earlier ones whose ids new sequences have."""
        if work.finished_sequence_ids or work.new:
            self._settings = None
        self._records.forget([*work.finished_sequence_ids, *(new.sequence_id for new in work.new)])

    def of(self, work: SchedulerOutput, positions: np.ndarray) -> Draws:
        """Prepare the draws of a step, for tokens at `positions`, int64 [S].

        While the same sequences are drawn from, only positions and edits change.
        """
        sequence_ids = [task.sequence_id for task in work.samples]
        sequences = [self._sequences[sequence_id] for sequence_id in sequence_ids]
        if self._settings is None or self._settings.sequence_ids != sequence_ids:
            self._settings = DrawSettings.of(sequences, self._rows.rows(sequence_ids))
        batch, columns, special = self._settings[1:]
        draws = Draws(sequences, batch, columns._replace(positions=positions), special, {})
        return self._apply_edits(draws, self._sequences.edits_of(sequences, positions.tolist()))

    def launch(self, logits: LogitRows, draws: Draws, columns: CudaDraws, drawn: DrawMemory | None = None) -> Tensor:
        """Launch draws and return their outcome, for `to_output`; `columns` are `draws` on the device.

        `drawn`: the memory of a graph that has drawn already.
        """
        pieces = row_pieces(len(draws.sequences), self._vocab_size, self._device)
        if len(pieces) == 1:
            return self.sampler.draw(logits.take(pieces[0]), columns, self._rows.last_tokens, drawn)
        outcomes = []
        for piece in pieces:
            part = draws.part(piece)
            arrived = CudaDraws.of(part, upload(part.sent, self._device))
            arrived = CudaDraws(*arrived[:3], *columns[3:])  # all pieces have the same columns
            outcome = self.sampler.draw(logits.take(piece), arrived, self._rows.last_tokens)
            outcomes.append(outcome.clone())  # the next piece may be drawn in the same memory
        return torch.cat(outcomes)

    def behind_drafts(self, work: SchedulerOutput, logits: LogitRows, first_rows: np.ndarray) -> ModelRunnerOutput:
        """Draw behind drafted tokens and wait for the outcome; `first_rows` int64 [S]: each sample's first of `logits`.

        A sequence whose logits may be edited draws one token after the other, as without drafts: its record on the
        device learns of each when the next is drawn, and so does the host.
        """
        sequences = [self._sequences[task.sequence_id] for task in work.samples]
        drafts = [work.scheduled[task.row].draft_token_ids for task in work.samples]
        firsts = [len(sequence.token_ids) for sequence in sequences]
        lasts = [first + len(draft) for first, draft in zip(firsts, drafts, strict=True)]
        edited = {index for places in (firsts, lasts) for index in self._sequences.edits_of(sequences, places)}
        rows = zip(sequences, first_rows.tolist(), drafts, strict=True)
        tasks = [DraftTask(*each, one_by_one=index in edited) for index, each in enumerate(rows)]
        out = draw_behind_drafts(tasks, partial(self._draw_rows, logits))
        self.put_last_tokens(sequences, [sequence.token_ids[-1] for sequence in sequences])
        return out

    def put_last_tokens(self, sequences: Sequence[NewSequence], token_ids: Sequence[int]) -> None:
        """Replace the last tokens of sequences on the device."""
        rows = self._rows.rows([sequence.sequence_id for sequence in sequences])
        places, tokens = upload([rows, np.array(token_ids, np.int64)], self._device)
        self._rows.last_tokens[places] = tokens

    def _draw_rows(self, logits: LogitRows, rows: list[Row]) -> ModelRunnerOutput:
        sequences, positions = [row.sequence for row in rows], [row.position for row in rows]
        edits = self._sequences.edits_of(sequences, positions)
        places = np.full(len(rows), -1)
        places[list(edits)] = self._rows.rows([sequences[index].sequence_id for index in edits])
        batch = SamplingBatch.from_tasks(
            [s.params for s in sequences], seeds=[s.seed for s in sequences], positions=positions
        )
        special = special_columns(batch, [], np.empty(0, np.int64))
        draws = self._apply_edits(Draws(sequences, batch, columns_of(batch, places), special, {}), edits)
        where = np.array([row.row for row in rows], np.int64)
        arrived = upload([where, *draws.sent], self._device)
        some = logits.at(arrived[0])
        out = to_output(draws, Download(self.launch(some, draws, CudaDraws.of(draws, arrived[1:]))).wait())
        if draws.on_host:
            draw_rows(out, draws, some, self._vocab_size)
        return out

    def _apply_edits(self, draws: Draws, edits: Mapping[int, LogitEdits]) -> Draws:
        """Add the edits of rows, by row, to `draws`."""
        on_host = {row: each for row, each in edits.items() if each.need_host}
        edited = [row for row in edits if row not in on_host]
        if not edited:
            return draws._replace(on_host=on_host)
        records = self._records.addresses([edits[row] for row in edited])
        return draws._replace(special=special_columns(draws.batch, edited, records), on_host=on_host)
