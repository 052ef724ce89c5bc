"""Draws behind drafted tokens: of each sequence as many as its draft was right, and one more.

Rows are drawn all at once, those behind a wrong token unused: a row costs little. Logits are edited as if the drafted
tokens before them were right. But a logits processor, which is code of the user's, is to see drawn tokens alone, so a
sequence that has one draws its next token when the one before is known.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rollout_engine.base.messages import ModelRunnerOutput, NewSequence
from rollout_engine.model.sampling.draw_pieces import joined


class DraftTask(NamedTuple):
    """Draws of one sequence."""

    sequence: NewSequence
    row: int
    """Index of the first row of logits; those behind the drafted tokens follow it."""
    draft: list[int]
    one_by_one: bool
    """Whether a token is drawn only when the one before it is known."""


class Row(NamedTuple):
    """One draw."""

    sequence: NewSequence
    row: int
    """Index into the logits."""
    position: int
    """Index of the token to draw in its sequence."""
    drafted: list[int]
    """The drafted tokens between those of the sequence and this one."""


def draw_behind_drafts(tasks: Sequence[DraftTask], draw: Callable[[list[Row]], ModelRunnerOutput]) -> ModelRunnerOutput:
    """Draw the tokens of `tasks` by `draw`, and append those that stand to their sequences."""
    todo = [(task, 1 if task.one_by_one else 1 + len(task.draft)) for task in tasks]
    kept: dict[int, list[int]] = {id(task): [] for task in tasks}
    """Rows of all parts end to end that stand, by task."""
    parts: list[ModelRunnerOutput] = []
    num_rows = 0
    while todo:
        rows = []
        for task, num in todo:
            first = len(kept[id(task)])
            position = len(task.sequence.token_ids)
            for i in range(num):
                drafted = task.draft[first : first + i]
                rows.append(Row(task.sequence, task.row + first + i, position + i, drafted))
        part = draw(rows)
        parts.append(part)
        again, start = [], 0
        for task, num in todo:
            if _keep(task, part.token_ids[start : start + num], kept[id(task)], num_rows + start):
                again.append((task, 1))
            start += num
        num_rows += start
        todo = again
    out = taken(joined(parts), [row for task in tasks for row in kept[id(task)]])
    out.num_drawn = [len(kept[id(task)]) for task in tasks]
    return out


def rows_up_to(last_rows: np.ndarray, num_before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand each of `last_rows`, int64 [N], to the `num_before` rows right before it and itself.

    Returns these rows, int64 [N + sum of `num_before`], and the index among them of the first row of each, int64 [N].
    """
    counts = num_before + 1
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(last_rows + 1 - ends, counts), ends - counts


def _keep(task: DraftTask, token_ids: list[int], kept: list[int], first_row: int) -> bool:
    """Append tokens to their sequence, up to the first that was not drafted; whether there are more to draw."""
    for i, token_id in enumerate(token_ids):
        place = len(kept)
        kept.append(first_row + i)
        task.sequence.token_ids.append(max(token_id, 0))  # after a failure the sequence ends
        if place >= len(task.draft) or token_id != task.draft[place]:
            return False
    return True


def taken(output: ModelRunnerOutput, rows: list[int]) -> ModelRunnerOutput:
    """These rows of an output, in this order."""
    place_of = {row: place for place, row in enumerate(rows)}
    top = output.top_logprobs
    return ModelRunnerOutput(
        token_ids=[output.token_ids[row] for row in rows],
        logprobs=None if output.logprobs is None else [output.logprobs[row] for row in rows],
        kept_logprob_mass=None if output.kept_logprob_mass is None else [output.kept_logprob_mass[row] for row in rows],
        top_logprobs=None if top is None else (top[0][rows], top[1][rows]),
        errors={place_of[row]: message for row, message in output.errors.items() if row in place_of},
        sampled_ranks=None if output.sampled_ranks is None else np.asarray(output.sampled_ranks)[rows],
        id_logprobs={place_of[row]: values for row, values in output.id_logprobs.items() if row in place_of},
        supports={place_of[row]: ids for row, ids in output.supports.items() if row in place_of},
        entropies=None if output.entropies is None else output.entropies[rows],
    )
