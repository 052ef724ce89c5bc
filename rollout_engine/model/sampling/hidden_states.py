"""Hidden states behind the final norm, as requests ask for them: of the tokens they draw, and of their prompts.

    "sampled"    row t: the state from which token t was drawn, that of the position before it
    "all"        the same; and of the prompt a row for each of its tokens, the last of which is row 0 of "sampled"

They are carried in the model's own dtype (`base.hidden_states`). A preempted sequence computes its prompt anew, unless
it has sampled tokens: then the states of the prompt have been returned.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput


class StateRecorder:
    """Chooses the rows of each step whose states are asked for, and adds these to the step's output."""

    def __init__(self) -> None:
        self._asking: set[int] = set()
        """Sequences that ask for the states of sampled tokens."""
        self._prompts: dict[int, _Prompt] = {}
        """Prompts whose states are asked for, as far as they are computed, by sequence."""
        self._drawn: list[_Drawn] = []
        self._pieces: list[_Piece] = []
        self._states = torch.empty(0)

    def update(self, work: SchedulerOutput) -> None:
        """Drop finished sequences and add new ones."""
        for sequence_id in work.finished_sequence_ids if self._asking else ():
            self._asking.discard(sequence_id)
            self._prompts.pop(sequence_id, None)
        asked = {new.sequence_id: new for new in work.new if new.params.return_hidden_states is not None}
        if not asked:
            return
        self._asking |= asked.keys()
        for chunk in work.scheduled:  # the sequence that computes the prompt for its siblings
            new = asked.get(chunk.sequence_id)
            if new is not None and new.params.return_hidden_states == "all":
                if len(new.token_ids) == new.num_prompt_tokens:
                    self._prompts[chunk.sequence_id] = _Prompt(new.num_prompt_tokens, [])

    def rows(self, work: SchedulerOutput, token_starts: np.ndarray) -> list[int]:
        """Rows of the flat batch whose states `take` needs; `token_starts`: int64 [chunks + 1]."""
        self._drawn, self._pieces = [], []
        rows: list[int] = []
        if not self._asking:
            return rows
        for task in work.samples:
            chunk = work.scheduled[task.row]
            if task.sequence_id in self._asking:
                count = 1 + len(chunk.draft_token_ids)
                first = int(token_starts[task.row + 1]) - count
                self._drawn.append(_Drawn(len(rows), count))
                rows += range(first, first + count)
            else:
                self._drawn.append(_Drawn(0, 0))
        for index, chunk in enumerate(work.scheduled if self._prompts else ()):
            prompt = self._prompts.get(chunk.sequence_id)
            if prompt is not None:
                first = int(token_starts[index])
                self._pieces.append(_Piece(index, chunk.sequence_id, len(rows), chunk.num_scheduled_tokens))
                rows += range(first, first + chunk.num_scheduled_tokens)
        return rows

    def take(self, states: Tensor) -> None:
        """Take the states [n, H] of `rows`."""
        self._states = states

    def add_to(self, out: ModelRunnerOutput) -> None:
        """Fill in the states of the tokens that the step drew, and of the prompts that it completed."""
        if not len(self._states) or not (self._drawn or self._pieces):
            return
        states, self._states = _carry(self._states), torch.empty(0)
        self._fill_drawn(out, states)
        for piece in self._pieces:
            prompt = self._prompts[piece.sequence_id]
            prompt.parts.append(states[piece.start : piece.start + piece.num_rows])
            if sum(map(len, prompt.parts)) == prompt.num_tokens:
                out.prompt_hidden_states[piece.place] = np.concatenate(prompt.parts)
                del self._prompts[piece.sequence_id]

    def _fill_drawn(self, out: ModelRunnerOutput, states: np.ndarray) -> None:
        if not any(each.num_rows for each in self._drawn):
            return
        num_drawn: Sequence[int] = out.num_drawn or [1] * len(self._drawn)
        out.hidden_states = np.zeros((sum(num_drawn), states.shape[1]), states.dtype)
        end = 0
        for each, num in zip(self._drawn, num_drawn, strict=True):
            end += num
            if each.num_rows:
                out.hidden_states[end - num : end] = states[each.start : each.start + num]


class _Prompt(NamedTuple):
    """One prompt, and the states of its tokens so far."""

    num_tokens: int
    parts: list[np.ndarray]


class _Drawn(NamedTuple):
    """States of one sample task among those of the step: one, and one more for each drafted token; 0: none asked."""

    start: int
    num_rows: int


class _Piece(NamedTuple):
    """States of the part of a prompt that a step computes."""

    place: int
    """Index into `scheduled`."""
    sequence_id: int
    start: int
    num_rows: int


def _carry(states: Tensor) -> np.ndarray:
    """States [n, H] as they are carried, copied."""
    values = states.view(torch.int16) if states.dtype == torch.bfloat16 else states.float()
    carried: np.ndarray = np.array(values.cpu().numpy())
    return carried
