"""What a step draws, as columns: made on the host, sent to the device with the rest of the step.

A sequence whose logits are edited is drawn twice: with all others, from the model's own logits, and then from a float32
copy of them that is edited. So nothing changes for the others, and a log-prob that knows of no edit comes about in one
way.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu.sampling import Truncation
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton.sampling import Choice, SamplingRows
from rollout_engine.messages import NewSequence
from rollout_engine.model.logit_edits import LogitEdits
from rollout_engine.model.sampler import SamplingBatch

Column = TypeVar("Column", np.ndarray, Tensor)


class DrawColumns(NamedTuple, Generic[Column]):
    """Of N rows."""

    temperatures: Column
    """float32, of `row_temperatures`."""
    seeds: Column
    """int64."""
    positions: Column
    """int64, of the tokens to draw in their sequences."""
    choices: Column
    """int32 of `Choice`."""
    top_k: Column
    """int64, as the next two of `Truncation`."""
    top_p: Column
    min_p: Column
    truncates: Column
    """bool: rows that the three may cut."""
    places: Column
    """int64, of their sequences on the device: there go the tokens; nowhere where negative."""

    @property
    def rows(self) -> SamplingRows:
        """For the kernels."""
        assert isinstance(self.temperatures, Tensor)
        return SamplingRows(self.temperatures, self.seeds, self.positions, self.choices)

    @property
    def rules(self) -> Truncation:
        """For the kernels."""
        assert isinstance(self.temperatures, Tensor)
        return Truncation(self.temperatures, self.top_k, self.top_p, self.min_p)

    def part(self, index: "slice | np.ndarray") -> "DrawColumns[Column]":
        """Some of the rows."""
        return DrawColumns(*(column[index] for column in self))


class SpecialColumns(NamedTuple, Generic[Column]):
    """Which rows ask for more, each int64."""

    edited: Column
    """[E]."""
    records: Column
    """[E], addresses of `kernels.triton.logit_edits.record`."""
    raw: Column
    """Rows whose log-probs are raw, where that is not as tempered."""
    processed: Column
    """Rows whose log-probs are processed."""
    processed_edits: Column
    """Which of the edited rows are processed too."""


class Draws(NamedTuple):
    """Those of one step, on the host."""

    sequences: list[NewSequence]
    batch: SamplingBatch
    """Without positions."""
    columns: DrawColumns[np.ndarray]
    special: SpecialColumns[np.ndarray] | None
    """None where no row asks for more."""
    on_host: dict[int, LogitEdits]
    """Rows that users' own code edits."""

    @property
    def has_rules(self) -> bool:
        """Whether any row may be cut."""
        return bool(self.columns.truncates.any())

    @property
    def num_top(self) -> int:
        """The most likely tokens that any row asks for."""
        return int(self.batch.num_top.max(initial=0))

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
        """Columns of what is special."""
        if self.special is None:
            return []
        edited = self.special.edited
        return [*self.special, *(self.columns.part(edited) if len(edited) else ())]


class DeviceDraws(NamedTuple):
    """The same on the device."""

    columns: DrawColumns[Tensor]
    special: SpecialColumns[Tensor] | None
    edited: DrawColumns[Tensor] | None
    """Of the edited rows."""
    has_rules: bool
    num_top: int

    @classmethod
    def of(cls, draws: Draws, plain: Sequence[Tensor], more: Sequence[Tensor] = ()) -> "DeviceDraws":
        """From what has become of `draws.plain` and, behind it or apart, of `draws.more`."""
        columns = iter((*plain, *more))
        taken = DrawColumns(*islice(columns, len(DrawColumns._fields)))
        special = SpecialColumns(*islice(columns, len(SpecialColumns._fields))) if draws.more else None
        edited = list(columns)
        return cls(taken, special, DrawColumns(*edited) if edited else None, draws.has_rules, draws.num_top)


class DrawSettings(NamedTuple):
    """What is drawn for the same sequences in every step; columns without positions."""

    sequence_ids: list[int]
    batch: SamplingBatch
    columns: DrawColumns[np.ndarray]
    special: SpecialColumns[np.ndarray] | None
    """Where nothing is edited."""

    @classmethod
    def of(cls, sequences: list[NewSequence], places: np.ndarray) -> "DrawSettings":
        """`places` of the sequences on the device."""
        batch = SamplingBatch.from_tasks(
            [s.params for s in sequences], seeds=[s.seed for s in sequences], positions=[0] * len(sequences)
        )
        special = special_columns(batch, [], np.empty(0, np.int64))
        return cls([s.sequence_id for s in sequences], batch, columns_of(batch, places), special)


def columns_of(batch: SamplingBatch, places: np.ndarray) -> DrawColumns[np.ndarray]:
    """Of `batch`, whose sequences have these places on the device."""
    given = torch.from_numpy(batch.temperature)
    truncates = batch.truncates
    return DrawColumns(
        temperatures=row_temperatures(given, given[:, None]).numpy(),
        seeds=batch.seeds,
        positions=batch.positions,
        choices=np.where(batch.temperature == 0, Choice.GREEDY, Choice.DRAWN).astype(np.int32),
        top_k=np.where(truncates, batch.top_k, 0),
        top_p=np.where(truncates, batch.top_p, 1.0),
        min_p=np.where(truncates, batch.min_p, 0.0),
        truncates=truncates,
        places=places,
    )


def special_columns(
    batch: SamplingBatch, edited: Sequence[int], records: np.ndarray
) -> SpecialColumns[np.ndarray] | None:
    """Of `batch`, some of whose rows are edited on the device; None where no row asks for more."""
    rows, processed = np.array(edited, np.int64), batch.is_processed
    asked = (which.nonzero()[0] for which in (batch.is_raw, processed, processed[rows]))
    special = SpecialColumns(rows, records, *asked)
    return special if any(map(len, special)) else None
