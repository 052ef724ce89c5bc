"""The routed experts of a step's tokens: recorded, kept with their KV, and returned with the tokens drawn.

    forward ── routers' choices [T, L, k] ──> a column of the KV pool ──> a prompt's rows, once it is complete
                                         └──> the row behind which each token was drawn

In the pool they are shared and copied with the KV: by samples of the same prompt, by a next turn. Only requests that
ask share KV with one another (`Request.kv_space`), so the blocks they find have records. Steps in which none asks
record nothing, and the column is made by the first that does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.routers import replaying, routing_info
from rollout_engine.model.sequences.routed_requests import RoutedRequests


class RoutingRecorder:
    """Records the choices of a model's routers for the sequences that ask."""

    def __init__(self, model: CpuModel) -> None:
        self._model = model
        self.info = routing_info(model.routers) if model.stage is None else model.stage.routing
        """Sizes of the routers of all layers; None if nothing can be recorded."""
        self._block_size = model.kv.block_size
        self._kept: Tensor | None = None
        """[num_blocks, block_size, L, k], next to the KV."""
        self._requests = RoutedRequests()
        self._rows: np.ndarray | None = None
        """[T, L, k] of the step's tokens; None if no request asks."""

    def update(self, work: SchedulerOutput) -> None:
        """Drop finished sequences and add new ones."""
        self._requests.update(work)

    def keep(self) -> None:
        """Make the column in which choices are kept next to the KV, if there are routers and it does not exist."""
        if self._kept is None and self.info is not None:
            dtype = torch.uint8 if self.info.dtype == np.uint8 else torch.int16
            self._kept = self._model.kv.add_column(self.info.shape, dtype)

    @contextmanager
    def step(self, work: SchedulerOutput, batch: FlatBatch) -> Iterator[None]:
        """Inside, record the forward of `batch`, if a sequence of it asks."""
        self._rows = None
        if not self._requests.are_in(work):
            yield
            return
        with self._model.recording() as found:
            yield
        if self._model.passes_on:
            return
        assert self.info is not None, "requests that ask were checked"
        self._rows = found[-1].numpy().astype(self.info.dtype)
        self.keep()
        assert self._kept is not None, "it was just made"
        self._kept.numpy()[_places(batch, self._block_size)] = self._rows

    def add_to(self, out: ModelRunnerOutput, work: SchedulerOutput, batch: FlatBatch) -> None:
        """Fill in the experts of the tokens that the step drew, and of the prompts that it completed."""
        if self._rows is None:
            return
        ends = batch.columns.token_starts[1:]
        num_drawn = out.num_drawn or [1] * len(work.samples)
        rows: list[int] = []
        for task, num in zip(work.samples, num_drawn, strict=True):
            first = ends[task.row] - 1 - len(work.scheduled[task.row].draft_token_ids)
            rows += range(first, first + num)
        out.routed_experts = self._rows[rows]
        for index, num_tokens in self._requests.list_completed(work):
            out.prompt_routed_experts[index] = self._kept_rows(batch, index, num_tokens - 1)

    @contextmanager
    def replaying(self, routed_experts: Sequence[np.ndarray], num_columns: int) -> Iterator[None]:
        """Inside, forwards of padded rows [B, num_columns] send tokens to these experts, int16 [n, L, k] each row."""
        assert self.info is not None, "what is to be replayed was checked"
        given = np.full((len(routed_experts), num_columns, *self.info.shape), -1, np.int64)
        for row, experts in enumerate(routed_experts):
            given[row, : len(experts)] = experts
        chosen, stage = torch.from_numpy(given).flatten(0, 1), self._model.stage
        if stage is not None:
            chosen = chosen[:, stage.first_router : stage.first_router + stage.num_own_routers]
        with replaying(self._model.routers, chosen):
            yield

    def _kept_rows(self, batch: FlatBatch, index: int, num_tokens: int) -> np.ndarray:
        """The experts of the first tokens of a chunk's sequence, [num_tokens, L, k]."""
        assert self._kept is not None, "its last token was just recorded"
        columns, positions = batch.columns, np.arange(num_tokens)
        blocks = columns.blocks.reshape(-1)[columns.block_starts[index] + positions // self._block_size]
        rows: np.ndarray = self._kept.numpy()[blocks, positions % self._block_size]
        return rows


def _places(batch: FlatBatch, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(block, offset) of each token of a batch, int [T]."""
    columns, positions = batch.columns, batch.positions
    starts = np.repeat(columns.block_starts, np.diff(columns.token_starts))
    return columns.blocks.reshape(-1)[starts + positions // block_size], positions % block_size
