"""Reads the rows of a dataset again, up to the position of a collector, and compares them."""

from collections.abc import Iterator, Mapping

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.journal.position import SAME_DATASET, Position, add_row, refuse_row, row_digest
from rollout_engine.rollouts.plan import GroupTask
from rollout_engine.text.picture_parts import holds_pictures


def read_open_tasks(tasks: Iterator[GroupTask], position: Position) -> list[GroupTask]:
    """Read as many tasks as the position has rows. Returns those of open groups, with their seeds.

    Raises `RequestError`, naming the first row that is seen to differ, if the rows are not those of the position.
    """
    rows, found = 0, []
    for index in range(position.num_rows):
        task = next(tasks, None)
        if task is None:
            raise RequestError.for_field(
                "dataset", f"{index} rows", f"at least {position.num_rows} rows long", SAME_DATASET
            )
        row = row_digest(task)
        rows = add_row(rows, row)
        group = position.open.get(index)
        if group is not None:
            if row != group.row:
                raise refuse_row(task)
            found.append(task.with_seed(group.seed))
    if rows != position.rows:
        bound = f"the rows that were read before: digest {position.rows:016x}"
        raise RequestError.for_field(f"dataset[:{position.num_rows}]", f"digest {rows:016x}", bound, SAME_DATASET)
    return found


def pictures_of(frontend: Frontend, task: GroupTask) -> list[PlacedPicture]:
    """The pictures of a prompt, at their places among its tokens."""
    prompt = task.prompt
    if not holds_pictures(prompt) and not (isinstance(prompt, Mapping) and prompt.get("pictures")):
        return []
    return list(frontend.inputs.check(task.input, task.params).pictures)
