"""Conversion of sessions to the TensorDict that trainers read: the keys of `rollouts.episodes.rows`, and these.

One row for each row of each session; an episode that ended before its first answer has one that is empty.

    key             shape   meaning
    "session_id"    [B]     the session's id
    "row_index"     [B]     int64; number of the row in its session
    "parent_row"    [B]     int64; number of the row that it branches from, -1 for none
    "began"         [B]     why it began: `rollout_engine.sessions.branches.Reason`

("masks", "turn") and "num_turns" count the answers of the whole session. ("rewards", "turn") has the reward of a row at
its last answer. "seed" is the base of the seeds of the session's requests, and "messages" the row's own conversation,
with a `Picture` for each picture.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack

from rollout_engine.base.outputs import FinishReason
from rollout_engine.batches.rollout_batch import Layout, rollout_batch
from rollout_engine.batches.summary import RolloutBatch
from rollout_engine.rollouts.agents.episode import AgentEpisode
from rollout_engine.rollouts.episodes.conversation import Row
from rollout_engine.rollouts.episodes.rows import row_output
from rollout_engine.sessions.rows import SessionRow
from rollout_engine.text.tokenizer import TextCodec


class AgentRow(NamedTuple):
    """One row of the batch, and whose it is."""

    episode: AgentEpisode
    row: SessionRow

    @property
    def reward(self) -> float:
        """The row's own reward, or the episode's."""
        own = self.episode.outcome.reward
        if own is None:
            own = self.row.reward
        return 0.0 if own is None else own

    @property
    def last_turn(self) -> int:
        """Number of its last answer; -1 without one."""
        return max(self.row.turns, default=-1)


def agent_batch(
    episodes: Sequence[AgentEpisode],
    codec: TextCodec | None,
    *,
    pad_token_id: int,
    layout: Layout = "padded",
    has_rewards: bool = True,
) -> RolloutBatch:
    """Build one TensorDict from episodes that have ended, with the keys of the table above.

    `has_rewards`: whether it has ("next", "reward").
    """
    assert codec is not None, "agents need a tokenizer"
    rows = [row for episode in episodes for row in _rows(episode)]
    batch = rollout_batch(
        [
            row_output(
                Row(row.prompt_token_ids, row.response, row.turns, row.samples, row.pictures),
                codec,
                request_id=f"{episode.key}-{row.row}",
                index=episode.member,
                finish_reason=_finish_reason(episode, row),
                seed=episode.seed,
                error=episode.outcome.error,
            )
            for episode, row in rows
        ],
        pad_token_id=pad_token_id,
        group_ids=[row.episode.group for row in rows],
        rewards=[[row.reward] for row in rows] if has_rewards else None,
        turns=[np.array(row.row.turns, np.int64) for row in rows],
        layout=layout,
    )
    _add_ends(batch, rows)
    for name, values in (
        ("num_turns", [row.episode.num_turns for row in rows]),
        ("episode_id", [row.episode.key for row in rows]),
        ("seat", [0 for _ in rows]),
        ("row_index", [row.row.row for row in rows]),
        ("parent_row", [row.row.parent_row for row in rows]),
    ):
        batch[name] = torch.tensor(values, dtype=torch.int64)
    batch["session_id"] = NonTensorStack(*(row.episode.session_id for row in rows))
    batch["began"] = NonTensorStack(*(row.row.began for row in rows))
    batch["messages"] = NonTensorStack(*(row.row.messages for row in rows))
    batch["info"] = NonTensorStack(*(dict(row.episode.outcome.info) for row in rows))
    return batch


def _rows(episode: AgentEpisode) -> Iterator[AgentRow]:
    for row in episode.rows or [SessionRow(episode.session_id, 0, -1, "start", [])]:
        yield AgentRow(episode, row)


def _add_ends(batch: RolloutBatch, rows: Sequence[AgentRow]) -> None:
    """Add how the episodes ended, and the rewards of turns."""
    most = max((row.episode.num_turns for row in rows), default=0)
    rewards = torch.zeros(len(rows), most, dtype=torch.float32)
    for index, row in enumerate(rows):
        if row.last_turn >= 0:
            rewards[index, row.last_turn] = row.reward
    batch["rewards", "turn"] = rewards
    terminated = [row.episode.outcome.ended_by == "terminated" for row in rows]
    batch["next", "terminated"] = _column(terminated)
    batch["next", "truncated"] = _column([not each for each in terminated])
    batch["next", "done"] = _column([True for _ in rows])
    batch["truncated"] = _column([_is_cut(row.row) for row in rows])
    batch["ended_by"] = NonTensorStack(*(row.episode.outcome.ended_by for row in rows))
    batch["error"] = NonTensorStack(*(row.episode.outcome.error for row in rows))


def _finish_reason(episode: AgentEpisode, row: SessionRow) -> FinishReason:
    if episode.outcome.error is not None:
        return "error"
    return (row.samples[-1][1].finish_reason or "abort") if row.samples else "stop"


def _is_cut(row: SessionRow) -> bool:
    return bool(row.samples) and row.samples[-1][1].finish_reason != "stop"


def _column(values: list[bool]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)
