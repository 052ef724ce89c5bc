"""Training rows of a session.

    row    = prompt | sampled | context | sampled | context | sampled
    branch = prompt (with the ids that it shares with its parent row) | sampled | ...

The first turn that continues another one is in its row; each further one begins a row. So all rows together have every
sampled token once in their masks.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.forest import Turn
from rollout_engine.sessions.pictures import place_after


class SessionRow(msgspec.Struct):
    """A prompt and all that follows it."""

    session_id: str
    row: int
    """Its number in the session; it never changes."""
    parent_row: int
    """The row from which it branches; -1 for none."""
    began: str
    """Why it began: `sessions.branches.Reason`."""
    prompt_token_ids: list[int]
    """All context before the first token that this row samples itself."""
    response: list[int] = []
    """Sampled tokens, and the context between them."""
    mask: list[bool] = []
    """Which tokens of the response this row sampled."""
    turns: list[int] = []
    """For each of them the number of the turn that sampled it, in the session; -1 for context."""
    samples: list[tuple[int, CompletionOutput]] = []
    """Its answers, and the index in the response at which each begins."""
    messages: list[dict[str, Any]] = []
    """The conversation as the client has it, the last answer included."""
    reward: float | None = None
    num_shared: int = 0
    """Ids at the beginning of the prompt that the parent row has, too."""
    params: list[SamplingParams] = []
    """The sampling params of each answer."""
    adapters: list[str | None] = []
    """The adapter of each answer; None: the base model alone."""
    pictures: list[PlacedPicture] = []
    """At positions in prompt and response together."""

    def add(self, turn: Turn) -> None:
        """Append a turn's answer, and the context before it unless the row begins with it."""
        if self.samples:
            start = len(self.prompt_token_ids) + len(self.response)
            self.pictures = place_after(self.pictures, turn.own_pictures, start)
            self._append(turn.own_ids, -1)
        self.samples.append((len(self.response), turn.sample))
        self._append(turn.sample.token_ids, turn.number)
        if turn.params is not None:
            self.params.append(turn.params)
            self.adapters.append(turn.adapter)

    def _append(self, token_ids: list[int], number: int) -> None:
        self.response += token_ids
        self.mask += [number >= 0] * len(token_ids)
        self.turns += [number] * len(token_ids)


def make_rows(session_id: str, turns: Sequence[Turn], reward: float | None, own: dict[int, float]) -> list[SessionRow]:
    """The rows of all turns, in the order in which they began. `own`: rewards of single rows."""
    rows: list[SessionRow] = []
    row_of: dict[Turn, SessionRow] = {}
    last: dict[int, Turn] = {}
    for turn in turns:
        parent = turn.parent
        if parent is not None and not turn.begins_row:
            row = row_of[parent]
        else:
            origin = parent or turn.origin
            before = None if origin is None else row_of[origin]
            row = SessionRow(session_id, len(rows), -1 if before is None else before.row, turn.began, [])
            row.prompt_token_ids, row.pictures = turn.prompt_token_ids(), turn.prompt_pictures()
            if before is not None:
                row.num_shared = _num_equal(row.prompt_token_ids, [*before.prompt_token_ids, *before.response])
            rows.append(row)
        row.add(turn)
        row_of[turn], last[row.row] = row, turn
    for row in rows:
        row.messages = last[row.row].answered.messages()
        row.reward = own.get(row.row, reward)
    return rows


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
