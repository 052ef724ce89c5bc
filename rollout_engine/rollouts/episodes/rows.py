"""Conversion of episodes to the TensorDict that trainers read: the keys of `batches.rollout_batch`, and these.

One row for each seat that a policy plays, this one or another; with on_rewrite="branch" one for each branch. The
response is all that follows the first prompt; B rows, T longest full, in the packed layout [1, N] as there.

    key                     shape               meaning
    ("masks", "turn")       [B, T]              int64; the seat's turn that wrote a token, -1 elsewhere
    ("rewards", "turn")     [B, most turns]     float32; of each turn of the seat, 0 padded
    "num_turns"             [B]                 int64; turns of the seat
    "episode_id"            [B]                 int64; number of the episode in the rollout
    "seat"                  [B]                 int64
    "group_id"              [B]                 int64; number of the start times seats, plus the seat
    "seed"                  [B]                 int64; of the seat's first turn
    ("next", "reward")      [B, 1]              float32; the seat's return: the sum over its turns
    ("next", "terminated")  [B, 1]              bool; the environment ended the episode
    ("next", "truncated")   [B, 1]              bool; the environment, a limit of the rollout or a fault cut it off
    ("next", "done")        [B, 1]              bool; either: true of every row
    "truncated"             [B, 1]              bool; the row's last answer was cut off, however the episode ended
    "finish_reason"         [B]                 of the row's last answer, "stop" or "length"; "error" if it failed
    "ended_by"              [B]                 the cause of its end: `rollout_engine.rollouts.episodes.episode.EndedBy`
    "error"                 [B]                 why it failed, else None
    "messages"              [B]                 the seat's conversation, pictures in it as `Picture`
    "pictures"              [B]                 of prompt and response, as of a prompt in `batches.rollout_batch`
    "info"                  [B]                 of the environment's last observation

An episode that failed keeps the tokens and rewards that it had. One that failed before its first prompt has an empty
row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack

from rollout_engine.base.outputs import CompletionOutput, FinishReason, RequestOutput, VersionSpan
from rollout_engine.base.support import Support, support_of
from rollout_engine.batches.rollout_batch import Layout, rollout_batch
from rollout_engine.batches.sampled_columns import placed_rows, top_of
from rollout_engine.batches.summary import RolloutBatch
from rollout_engine.rollouts.episodes.conversation import Conversation, Row
from rollout_engine.rollouts.episodes.episode import Episode
from rollout_engine.text.tokenizer import TextCodec


class EpisodeRow(NamedTuple):
    """One row of the batch, and whose it is."""

    episode: Episode
    seat: int
    conversation: Conversation
    row: Row


def episode_batch(
    episodes: Sequence[Episode], codec: TextCodec | None, *, pad_token_id: int, layout: Layout = "padded"
) -> RolloutBatch:
    """Build one TensorDict from episodes that have ended, with the keys of the table above."""
    assert codec is not None, "environments need a tokenizer"
    rows = [row for episode in episodes for row in _rows(episode)]
    num_seats = max((len(episode.seats) for episode in episodes), default=1) or 1
    batch = rollout_batch(
        [_output(row, codec) for row in rows],
        pad_token_id=pad_token_id,
        group_ids=[row.episode.group * num_seats + row.seat for row in rows],
        rewards=[[row.conversation.total_reward] for row in rows],
        turns=[np.array(row.row.turns, np.int64) for row in rows],
        layout=layout,
    )
    most = max((row.conversation.num_turns for row in rows), default=0)
    rewards = torch.zeros(len(rows), most, dtype=torch.float32)
    for index, row in enumerate(rows):
        rewards[index, : row.conversation.num_turns] = torch.tensor(row.conversation.rewards, dtype=torch.float32)
    batch["rewards", "turn"] = rewards
    terminated = _column([row.episode.ended_by == "terminated" for row in rows])
    truncated = _column([row.episode.is_truncated for row in rows])
    batch["next", "terminated"], batch["next", "truncated"] = terminated, truncated
    batch["next", "done"] = terminated | truncated
    batch["truncated"] = _column([_is_cut(row) for row in rows])
    for name, values in (
        ("num_turns", [row.conversation.num_turns for row in rows]),
        ("episode_id", [row.episode.key for row in rows]),
        ("seat", [row.seat for row in rows]),
    ):
        batch[name] = torch.tensor(values, dtype=torch.int64)
    batch["ended_by"] = NonTensorStack(*(row.episode.ended_by for row in rows))
    batch["error"] = NonTensorStack(*(row.episode.error for row in rows))
    batch["messages"] = NonTensorStack(*(row.conversation.messages for row in rows))
    batch["info"] = NonTensorStack(*(dict(row.episode.info) for row in rows))
    return batch


def _rows(episode: Episode) -> Iterator[EpisodeRow]:
    played = [(seat, each) for seat, each in episode.seats.items() if each.rows]
    for seat, conversation in played:
        for row in conversation.rows:
            yield EpisodeRow(episode, seat, conversation, row)
    if not played:
        yield EpisodeRow(episode, 0, episode.seats.get(0) or Conversation(None), Row([]))


def _output(row: EpisodeRow, codec: TextCodec) -> RequestOutput:
    episode = row.episode
    return row_output(
        row.row,
        codec,
        request_id=str(episode.key),
        index=episode.member,
        finish_reason=_finish_reason(row),
        seed=episode.turn_seed(row.seat, 0),
        error=episode.error,
    )


def row_output(
    row: Row,
    codec: TextCodec,
    *,
    request_id: str,
    index: int,
    finish_reason: FinishReason,
    seed: int,
    error: str | None = None,
) -> RequestOutput:
    """The row as the output of one request whose completion includes the glue, with log-probs 0 and versions -1."""
    samples, response = row.samples, row.response
    completion = CompletionOutput(
        index=index,
        text=_text(response, codec),
        token_ids=response,
        logprobs=_place_values(samples, len(response), "logprobs"),
        top_logprobs=_top_logprobs(samples, len(response)),
        cumulative_logprob=None,
        kept_logprob_mass=_place_values(samples, len(response), "kept_logprob_mass"),
        finish_reason=finish_reason,
        stop_reason=None,
        version_spans=_spans(samples, len(response)),
        seed=seed,
        error=error,
        routed_experts=_routed_experts(samples, len(row.prompt) + len(response)),
        quantization=samples[0][1].quantization if samples else None,
        support=_support(samples, len(response)),
        entropies=_place_values(samples, len(response), "entropies"),
        hidden_states=placed_rows([(start, sample.hidden_states) for start, sample in samples], len(response), 0.0),
        forced=_place_forced(samples, len(response)),
    )
    prompt = codec.decode(row.prompt) if row.prompt else ""
    found = RequestOutput(request_id, prompt, row.prompt, None, [completion], True, 0)
    found.pictures = row.pictures
    return found


def _text(token_ids: list[int], codec: TextCodec) -> str:
    return codec.decode(token_ids) if token_ids else ""


def _finish_reason(row: EpisodeRow) -> FinishReason:
    if row.episode.ended_by == "error":
        return "error"
    return "length" if _is_cut(row) else "stop"


def _is_cut(row: EpisodeRow) -> bool:
    samples = row.row.samples
    return bool(samples) and samples[-1][1].finish_reason == "length"


def _column(values: list[bool]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)


def _place_values(samples: list[tuple[int, CompletionOutput]], length: int, name: str) -> np.ndarray | None:
    """float32 [length], 0 between the answers; None if no answer has such values."""
    parts = [(start, getattr(sample, name)) for start, sample in samples]
    if name != "logprobs" and all(values is None for _, values in parts):
        return None
    placed = np.zeros(length, np.float32)
    for start, values in parts:
        if values is not None:
            placed[start : start + len(values)] = values
    return placed


def _top_logprobs(samples: list[tuple[int, CompletionOutput]], length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The most likely tokens, [length, k], -1 and -inf between the answers; None if no answer has any."""
    tops = [(start, top_of(sample)) for start, sample in samples]
    ids, logprobs = (
        placed_rows([(start, None if top is None else top[place]) for start, top in tops], length, fill)
        for place, fill in enumerate((-1, -np.inf))
    )
    return None if ids is None or logprobs is None else (ids, logprobs)


def _place_forced(samples: list[tuple[int, CompletionOutput]], length: int) -> np.ndarray | None:
    """bool [length], of tokens that a budget of thinking forced; None if no answer has a budget."""
    placed = _place_values(samples, length, "forced")
    return None if placed is None else placed.astype(bool)


def _routed_experts(samples: list[tuple[int, CompletionOutput]], num_tokens: int) -> np.ndarray | None:
    """The experts of each token from the first turn that computed it, [n, L, k]; None if no answer has any."""
    parts = [sample.routed_experts for _, sample in samples if sample.routed_experts is not None]
    if not parts:
        return None
    rows = parts[0]
    for part in parts[1:]:
        rows = np.concatenate([rows, part[len(rows) :]])
    return rows[: num_tokens - 1]


def _support(samples: list[tuple[int, CompletionOutput]], length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The supports of the answers, and empty rows between them; None if no answer has any."""
    if all(sample.support is None for _, sample in samples):
        return None
    found = Support.place([(start, support_of(sample)) for start, sample in samples], length)
    return found.offsets, found.ids


def _spans(samples: list[tuple[int, CompletionOutput]], length: int) -> list[VersionSpan]:
    """The version spans of the answers, and between them spans of version -1."""
    spans: list[VersionSpan] = []
    ends = [*(start for start, _ in samples), length][1:]
    for (start, sample), end in zip(samples, ends, strict=True):
        spans += [
            VersionSpan(start + s.start, start + s.end, s.policy_version, s.kv_min_version)
            for s in sample.version_spans
        ]
        last = start + len(sample.token_ids)
        if last < end:
            spans.append(VersionSpan(last, end, -1, -1))
    return spans
