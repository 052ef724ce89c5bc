"""Pools the hidden states of prompts as their chunks are computed.

    chunk's rows ── states [n, H] behind the final norm ── (head: logits [n, L]) ──> kept, or added up, until the end

No result depends on the batch or on how its prompt was divided: the head's rows do not depend on one another, and sums
are taken token by token in float64. A preempted sequence starts over.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import NewSequence, ScheduledSequence, SchedulerOutput
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams

_LEAST_LENGTH = 1e-12
"""Least length to divide by, as in `torch.nn.functional.normalize`."""


class Pooler:
    """Results of pooling requests, chunk by chunk."""

    def __init__(self, info: PoolingInfo, head: Callable[[Tensor], Tensor] | None) -> None:
        """`head` turns hidden states [n, H] into logits [n, L]; None if the model has none."""
        self._info, self._head = info, head
        self._prompts: dict[int, _Prompt] = {}
        self._pieces: list[_Piece] = []

    def update(self, work: SchedulerOutput) -> None:
        """Drop finished prompts and add new ones."""
        if self._prompts:
            for sequence_id in work.finished_sequence_ids:
                self._prompts.pop(sequence_id, None)
        for new in work.new:
            if new.pooling is not None:
                self._prompts[new.sequence_id] = _Prompt(new, new.pooling, self._info)

    def rows(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """Rows of this step's flat batch whose hidden states `pool` needs."""
        self._pieces, rows, first_row = [], [], 0
        for index, chunk in enumerate(scheduled if self._prompts else ()):
            prompt = self._prompts.get(chunk.sequence_id)
            if prompt is not None:
                start, end = chunk.num_computed_tokens, chunk.num_computed_tokens + chunk.num_scheduled_tokens
                places = prompt.places(start, end)
                self._pieces.append(_Piece(index, chunk.sequence_id, prompt, len(places), end == prompt.num_tokens))
                rows += [first_row + place - start for place in places]
            first_row += chunk.num_scheduled_tokens
        return rows

    @torch.inference_mode()
    def pool(self, states: Tensor) -> dict[int, np.ndarray]:
        """Take the states [n, H] of `rows`; returns index into `scheduled` -> results of prompts now complete."""
        found: dict[int, np.ndarray] = {}
        start = 0
        for piece in self._pieces:
            prompt, part = piece.prompt, states[start : start + piece.num_rows]
            start += piece.num_rows
            if len(part):
                prompt.take(self._head(part) if prompt.params.uses_head and self._head is not None else part)
            if piece.is_last:
                found[piece.place] = prompt.result()
                del self._prompts[piece.sequence_id]
        return found


class _Prompt:
    """One prompt, and its pooled result so far."""

    def __init__(self, sequence: NewSequence, params: PoolingParams, info: PoolingInfo) -> None:
        self.params = params
        self.num_tokens = sequence.num_prompt_tokens
        self._token_ids = sequence.token_ids
        self._positions = info.positions(params)
        self._marks = None if params.step_token_ids is None else frozenset(params.step_token_ids)
        self._width = len(info.labels) if params.uses_head else info.hidden_size
        self._pieces: list[np.ndarray] = []
        self._sum = np.zeros(self._width, np.float64)

    def places(self, start: int, end: int) -> Sequence[int]:
        """Positions in [start, end) whose states are needed."""
        if self._marks is not None:
            return [place for place in range(start, end) if self._token_ids[place] in self._marks]
        if self._positions == "all":
            return range(start, end)
        place = 0 if self._positions == "first" else self.num_tokens - 1
        return [place] if start <= place < end else []

    def take(self, rows: Tensor) -> None:
        """Take the next rows [n, width]."""
        values = rows.float().cpu().numpy()
        if self.params.kind == "mean":  # token by token: chunks do not change the rounding
            self._sum = np.add.accumulate(np.vstack([self._sum, values.astype(np.float64)]), axis=0)[-1]
        else:
            self._pieces.append(values)

    def result(self) -> np.ndarray:
        """The result, once the last chunk has been taken: float32."""
        kind = self.params.kind
        if kind == "mean":
            rows = (self._sum / self.num_tokens).astype(np.float32)[None]
        else:
            rows = np.concatenate([np.zeros((0, self._width), np.float32), *self._pieces])
        if self.params.normalize:
            lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(-1, keepdims=True))
            rows = (rows / np.maximum(lengths, _LEAST_LENGTH)).astype(np.float32)
        if kind == "reward":
            return np.ascontiguousarray(rows[:, 0])
        is_one = kind == "mean" or self._positions != "all"
        return np.ascontiguousarray(rows[0] if is_one else rows)


class _Piece(NamedTuple):
    """The part of a prompt that a step computes."""

    place: int
    sequence_id: int
    prompt: _Prompt
    num_rows: int
    is_last: bool
