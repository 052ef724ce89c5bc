"""Sampling settings of many tasks, as columns."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.sampling_params import NO_TRUNCATION, SamplingParams, truncation_of
from rollout_engine.kernels.cpu.sampling import PreparedRows
from rollout_engine.kernels.draw import prepare
from rollout_engine.kernels.row_stats import Truncation, UniformsOf
from rollout_engine.kernels.token_logprobs import row_temperatures

_RAW, _PROCESSED = 1, 2
_MODE_CODES = {"tempered": 0, "raw": _RAW, "processed": _PROCESSED}


@dataclass(eq=False)
class SamplingBatch:
    """Sampling settings of N tasks as columns. Derived columns are computed once, whatever the positions."""

    temperature: np.ndarray
    """float64 [N]; 0 is greedy."""
    truncation: tuple[np.ndarray, ...]
    """Columns of `TRUNCATION_RULES`, each int64 or float64 [N]. Greedy rows ignore them."""
    seeds: np.ndarray
    """int64 [N], the bit patterns of the unsigned sequence seeds."""
    positions: np.ndarray
    """int64 [N], index of the token to draw in its sequence, prompt included."""
    modes: np.ndarray
    """int8 [N], codes of `SamplingParams.logprobs_mode`."""
    num_top: np.ndarray
    """int64 [N], how many most likely tokens to report."""
    wants_rank: np.ndarray
    """bool [N], whether to report the sampled token's rank."""
    wants_support: np.ndarray
    """bool [N], whether to report the tokens that the draw had left."""
    wants_entropy: np.ndarray
    """bool [N], whether to report the entropy of the tempered distribution."""
    wants_logprobs: bool
    """Whether any task asked for log-probs."""
    asked_ids: Mapping[int, list[int] | None] = field(default_factory=dict)
    """Row -> token ids whose log-probs to report, None for all; rows that did not ask are absent."""
    _whole_rows: PreparedRows | None = field(default=None, init=False, repr=False)
    """Rows of the last `whole_rows`."""

    @classmethod
    def from_tasks(cls, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> "SamplingBatch":
        """Columns of N tasks."""
        distinct = {id(p): p for p in params}  # requests of one call share theirs
        place = {key: i for i, key in enumerate(distinct)}
        row = np.array([place[id(p)] for p in params], np.intp)

        def column(dtype: type, values: Iterable[object]) -> np.ndarray:
            return np.array(list(values), dtype)[row]

        kinds = distinct.values()
        rules = [truncation_of(p) for p in kinds]
        return cls(
            temperature=column(np.float64, (p.temperature for p in kinds)),
            truncation=tuple(
                column(type(idle), [values[rule] for values in rules]) for rule, idle in enumerate(NO_TRUNCATION)
            ),
            seeds=np.array(seeds, np.uint64).view(np.int64),
            positions=np.array(positions, np.int64),
            modes=column(np.int8, (_MODE_CODES[p.logprobs_mode] for p in kinds)),
            num_top=column(np.int64, (p.num_top_logprobs for p in kinds)),
            wants_rank=column(np.bool_, (p.wants_ranks for p in kinds)),
            wants_support=column(np.bool_, (p.return_support for p in kinds)),
            wants_entropy=column(np.bool_, (p.entropy for p in kinds)),
            wants_logprobs=any(p.logprobs is not None for p in kinds),
            asked_ids=_asked_ids(params) if any(p.asks_for_ids for p in kinds) else {},
        )

    @cached_property
    def truncates(self) -> np.ndarray:
        """bool [N]: rows from which some rule may cut tokens."""
        pairs = zip(self.truncation, NO_TRUNCATION, strict=True)
        cut: np.ndarray = np.logical_or.reduce([column != idle for column, idle in pairs])
        truncates: np.ndarray = (self.temperature > 0) & cut
        return truncates

    @cached_property
    def is_raw(self) -> np.ndarray:
        """bool [N]: rows whose log-probs are raw and differ from tempered ones."""
        is_raw: np.ndarray = (self.modes == _RAW) & (self.temperature != 0) & (self.temperature != 1)
        return is_raw

    @cached_property
    def is_processed(self) -> np.ndarray:
        """bool [N]: rows whose log-probs are of the distribution they are drawn from."""
        is_processed: np.ndarray = self.modes == _PROCESSED
        return is_processed

    @cached_property
    def is_plain(self) -> bool:
        """Whether each row asks for nothing but a token and its tempered log-prob."""
        return not (self.wants_rank | self.is_processed | self.is_raw).any() and not self.asked_ids

    @cached_property
    def wants_any_support(self) -> bool:
        """Whether any row asks for its support."""
        return bool(self.wants_support.any())

    @cached_property
    def greedy(self) -> Tensor:
        """bool [N]: rows that take the most likely token."""
        return torch.from_numpy(self.temperature == 0)

    @cached_property
    def row_temperatures(self) -> Tensor:
        """float32 [N], of the log-probs."""
        given = torch.from_numpy(self.temperature)
        return row_temperatures(given, given[:, None])

    @cached_property
    def rules(self) -> Truncation | None:
        """The truncation of each row; None if no row is truncated."""
        return self.rules_of(self.truncates) if self.truncates.any() else None

    def rules_of(self, some: np.ndarray) -> Truncation:
        """The truncation of rows `some`, bool [N]; from the others nothing is cut."""
        temperature = np.where(some, self.temperature, 1.0)
        return Truncation(*map(torch.from_numpy, (temperature, *self.truncation_of(some))))

    def truncation_of(self, some: np.ndarray) -> tuple[np.ndarray, ...]:
        """`truncation` of rows `some`, bool [N], with values that cut nothing in the others."""
        pairs = zip(self.truncation, NO_TRUNCATION, strict=True)
        return tuple(np.where(some, column, idle) for column, idle in pairs)

    @property
    def uniforms(self) -> UniformsOf:
        """The uniforms that the rows are drawn by."""
        return UniformsOf(torch.from_numpy(self.seeds), torch.from_numpy(self.positions))

    def whole_rows(self, logits: Tensor) -> PreparedRows | None:
        """The rows [N, V] at their positions, none of them truncated, for C++, until the next call; None without it."""
        kept = self._whole_rows
        if kept is None or not kept.move(logits, torch.from_numpy(self.positions)):
            self._whole_rows = kept = prepare(logits, self.row_temperatures, self.uniforms, self.greedy, None)
        return kept

    def rows(self, index: np.ndarray) -> "SamplingBatch":
        """The settings of rows `index`, int64 [n]."""
        columns = {each.name: getattr(self, each.name)[index] for each in fields(self) if each.type is np.ndarray}
        truncation = tuple(column[index] for column in self.truncation)
        asked = {place: self.asked_ids[row] for place, row in enumerate(index.tolist()) if row in self.asked_ids}
        return replace(self, **columns, truncation=truncation, asked_ids=asked)

    def at(self, positions: np.ndarray) -> "SamplingBatch":
        """The same tasks at other `positions`, int64 [N]."""
        moved = copy(self)
        moved.positions = positions
        return moved


def _asked_ids(params: list[SamplingParams]) -> dict[int, list[int] | None]:
    asked = ((row, None if p.logprobs == -1 else p.logprob_token_ids) for row, p in enumerate(params) if p.asks_for_ids)
    return dict(asked)
