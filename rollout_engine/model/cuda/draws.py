"""The draws of a step as columns: made on the host, sent to the device with the rest of the step.

A sequence whose logits are edited is drawn twice: from the model's own logits like all others, then from an edited
float32 copy. So edits change nothing for other sequences, and log-probs before edits are computed in one way.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import NewSequence
from rollout_engine.base.sampling_params import NO_TRUNCATION, SamplingParams
from rollout_engine.kernels.row_stats import Truncation
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton.sampling import Choice, SamplingRows
from rollout_engine.model.sampling.logit_edits import LogitEdits
from rollout_engine.model.sampling.sampling_batch import SamplingBatch

Column = TypeVar("Column", np.ndarray, Tensor)


class DrawColumns(NamedTuple, Generic[Column]):
    """Sampling settings of N rows."""

    truncation: tuple[Column, ...]
    """Truncation columns of a `SamplingBatch`, with values that cut nothing in greedy rows."""
    temperatures: Column
    """float32, of `row_temperatures`."""
    seeds: Column
    """int64."""
    positions: Column
    """int64, positions of the tokens to draw in their sequences."""
    choices: Column
    """int32 of `Choice`."""
    truncates: Column
    """bool: rows from which some rule may cut tokens."""
    places: Column
    """int64: index into `last_tokens` at which each token is written; negative: not written."""

    @classmethod
    def of_flat(cls, columns: Iterator[Column]) -> "DrawColumns[Column]":
        """Take the columns that `flat` lists from an iterator."""
        return cls(tuple(islice(columns, len(NO_TRUNCATION))), *islice(columns, len(cls._fields) - 1))

    @property
    def flat(self) -> list[Column]:
        """All columns, for an upload."""
        return list(chain(self.truncation, self[1:]))

    @property
    def rows(self) -> SamplingRows:
        """The columns that every sampling kernel takes."""
        assert isinstance(self.temperatures, Tensor)
        return SamplingRows(self.temperatures, self.seeds, self.positions, self.choices)

    @property
    def rules(self) -> Truncation:
        """The columns that truncation kernels take."""
        assert isinstance(self.temperatures, Tensor)
        return Truncation(self.temperatures, *self.truncation)

    def part(self, index: "slice | np.ndarray") -> "DrawColumns[Column]":  # type: ignore[misc]  # of a generic tuple
        """The columns of rows `index`."""
        return DrawColumns.of_flat(column[index] for column in self.flat)


class SpecialColumns(NamedTuple, Generic[Column]):
    """Rows that ask for more than a token and its tempered log-prob, each column int64."""

    edited: Column
    """[E], rows whose logits are edited."""
    records: Column
    """[E], addresses of `kernels.triton.logit_edits.record`."""
    raw: Column
    """Rows whose log-probs are raw and differ from tempered ones."""
    processed: Column
    """Rows whose log-probs are processed."""
    processed_edits: Column
    """Indices of the edited rows whose log-probs are processed."""

    def part(self, piece: slice) -> "SpecialColumns[np.ndarray] | None":  # type: ignore[misc]  # of a generic tuple
        """The special rows of the rows `piece`, numbered from its start, on the host; None if there are none."""
        assert isinstance(self.edited, np.ndarray) and isinstance(self.processed_edits, np.ndarray)
        raw, processed = ((rows >= piece.start) & (rows < piece.stop) for rows in (self.raw, self.processed))
        edits = ((self.edited >= piece.start) & (self.edited < piece.stop)).nonzero()[0]
        special = SpecialColumns(
            edited=self.edited[edits] - piece.start,
            records=self.records[edits],
            raw=self.raw[raw] - piece.start,
            processed=self.processed[processed] - piece.start,
            processed_edits=np.isin(edits, self.processed_edits).nonzero()[0],
        )
        return special if any(map(len, special)) else None


class Draws(NamedTuple):
    """The draws of one step, on the host."""

    sequences: list[NewSequence]
    batch: SamplingBatch
    """Settings; its positions are not used."""
    columns: DrawColumns[np.ndarray]
    special: SpecialColumns[np.ndarray] | None
    """The rows that ask for more; None without any."""
    on_host: dict[int, LogitEdits]
    """Rows that logits processors edit, grammars restrict, or budgets of thinking may force."""

    @property
    def has_rules(self) -> bool:
        """Whether any row may be truncated."""
        return bool(self.columns.truncates.any())

    @property
    def num_top(self) -> int:
        """The most top tokens that any row asks for."""
        return int(self.batch.num_top.max(initial=0))

    @property
    def has_entropies(self) -> bool:
        """Whether any row asks for the entropy of its distribution."""
        return bool(self.batch.wants_entropy.any())

    @property
    def plain(self) -> DrawColumns[np.ndarray]:
        """Columns of the draw from the model's own logits."""
        if self.special is None or not len(self.special.edited):
            return self.columns
        places = self.columns.places.copy()
        places[self.special.edited] = -1  # an edit reads the last token there before it puts the next
        return self.columns._replace(places=places)

    @property
    def more(self) -> list[np.ndarray]:
        """Columns of `special`, then those of the edited rows."""
        if self.special is None:
            return []
        edited = self.special.edited
        return [*self.special, *(self.columns.part(edited).flat if len(edited) else ())]

    @property
    def sent(self) -> list[np.ndarray]:
        """Columns to upload for `CudaDraws.of`."""
        return [*self.plain.flat, *self.more]

    def part(self, piece: slice) -> "Draws":
        """The draws of rows `piece`."""
        return Draws(
            sequences=self.sequences[piece],
            batch=self.batch.rows(np.arange(piece.start, piece.stop)),
            columns=self.columns.part(piece),
            special=None if self.special is None else self.special.part(piece),
            on_host={row - piece.start: each for row, each in self.on_host.items() if piece.start <= row < piece.stop},
        )


class CudaDraws(NamedTuple):
    """The draws of one step, on the device."""

    columns: DrawColumns[Tensor]
    special: SpecialColumns[Tensor] | None
    edited: DrawColumns[Tensor] | None
    """Columns of the edited rows."""
    has_rules: bool
    num_top: int
    has_entropies: bool

    @classmethod
    def of(cls, draws: Draws, uploaded: Iterable[Tensor]) -> "CudaDraws":
        """Build the draws from the uploaded columns `draws.sent`."""
        columns, special, edited = iter(uploaded), None, None
        plain = DrawColumns.of_flat(columns)
        if draws.special is not None:
            special = SpecialColumns(*islice(columns, len(SpecialColumns._fields)))
            edited = DrawColumns.of_flat(columns) if len(special.edited) else None
        return cls(plain, special, edited, draws.has_rules, draws.num_top, draws.has_entropies)


class DrawSettings(NamedTuple):
    """Settings that stay the same while the same sequences are drawn from; columns have no positions."""

    sequence_ids: list[int]
    batch: SamplingBatch
    columns: DrawColumns[np.ndarray]
    special: SpecialColumns[np.ndarray] | None
    """Special rows in steps that edit nothing."""

    @classmethod
    def of(cls, sequences: list[NewSequence], places: np.ndarray) -> "DrawSettings":
        """`places`: indices into `last_tokens` at which the tokens of the sequences are written."""
        batch = SamplingBatch.from_tasks(
            [s.params for s in sequences], seeds=[s.seed for s in sequences], positions=[0] * len(sequences)
        )
        special = special_columns(batch, [], np.empty(0, np.int64))
        return cls([s.sequence_id for s in sequences], batch, columns_of(batch, places), special)


def columns_of(batch: SamplingBatch, places: np.ndarray) -> DrawColumns[np.ndarray]:
    """Columns of `batch`, whose tokens are written to `places`."""
    given = torch.from_numpy(batch.temperature)
    return DrawColumns(
        truncation=batch.truncation_of(batch.truncates),
        temperatures=row_temperatures(given, given[:, None]).numpy(),
        seeds=batch.seeds,
        positions=batch.positions,
        choices=np.where(batch.temperature == 0, Choice.GREEDY, Choice.DRAWN).astype(np.int32),
        truncates=batch.truncates,
        places=places,
    )


def padding_row() -> DrawColumns[np.ndarray]:
    """Columns of one row that asks for nothing and whose token is not written."""
    batch = SamplingBatch.from_tasks([SamplingParams()], seeds=[0], positions=[0])
    return columns_of(batch, np.array([-1]))


def special_columns(
    batch: SamplingBatch, edited: Sequence[int], records: np.ndarray
) -> SpecialColumns[np.ndarray] | None:
    """Special columns of `batch`, whose rows `edited` are edited on the device; None if no row asks for more."""
    rows, processed = np.array(edited, np.int64), batch.is_processed
    asked = (which.nonzero()[0] for which in (batch.is_raw, processed, processed[rows]))
    special = SpecialColumns(rows, records, *asked)
    return special if any(map(len, special)) else None
