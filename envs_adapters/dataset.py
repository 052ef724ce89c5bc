"""Data sets with reward functions: one prompt, one answer, and its reward.

    make_env("dataset:gsm8k.jsonl", reward_fn=is_right, prompt_column="question")
    make_env("dataset", rows=[{"prompt": "2 + 3?", "answer": "5"}, ...], reward_fn=[is_right, is_short])

    def is_right(completions, answer, **columns):
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

"dataset:PATH" is a JSONL file, or a directory that `datasets.Dataset.save_to_disk` wrote; `rows` is a list of dicts, a
dict of columns, or a `datasets.Dataset`. An episode has the row `seed % len(rows)`. A rollout gives its starts
successive seeds from a random one on: `num_episodes=len(rows)` plays each row once, and fewer episodes play rows that
stand next to one another, so shuffle rows whose order means something. An epoch of several rollouts gives each its part
of the rows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from inspect import isawaitable, iscoroutine
from typing import Any, TypeAlias

from envs_adapters.base import Action, Observation, load
from envs_adapters.rows import Row, Rows, check_function, index_of, read_rows, row_of
from rollout_engine.base.errors import ConfigError, RequestError, refused
from rollout_engine.batches.reward_functions import (
    ARGUMENTS,
    RewardCall,
    RewardFunction,
    checked_rewards,
    copies,
    is_listed,
    reward_arguments,
    reward_calls,
    weighted_sum,
)

TRAITS: dict[str, Any] = {"is_single_turn": True}

Rewarding: TypeAlias = RewardFunction | str | Sequence[RewardFunction | str]
"""A reward function, its "module:function", or a list of such."""


def make(
    name: str = "",
    *,
    rows: Rows | None = None,
    reward_fn: Rewarding,
    reward_weights: Sequence[float] | None = None,
    prompt_column: str = "prompt",
) -> "DatasetEnv":
    """One episode.

    Args:
        rows: instead of a path in the name.
        reward_fn: called as by `rollout(prompts, reward_fn=...)`, for each answer separately, with lists of one: the
            keywords `prompts`, `completions` (messages if the prompt is), `completion_ids`, and the other columns.
            Async functions are awaited; others are called on several threads at once, unless num_workers=1. Worker
            processes (placement="processes") import it: "module:function".
        reward_weights: one number for each of a list of functions; 1 unless given.
        prompt_column: of the prompt, a text or a list of messages.
    """
    return DatasetEnv(rows if rows is not None else name, reward_fn, reward_weights, prompt_column)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless there are rows, and the functions can be called with their columns."""
    if "reward_fn" not in options:
        raise ConfigError("dataset needs the option reward_fn: a reward function, or a list of them.")
    column = options.get("prompt_column", "prompt")
    if not isinstance(column, str):
        raise ConfigError(refused("prompt_column", column, "the name of a column"))
    columns = check_rows(name, options.get("rows"), [column]).keys() - {column}
    listed = is_listed(options["reward_fn"])
    for i, function in enumerate(options["reward_fn"] if listed else [options["reward_fn"]]):
        check_function(f"reward_fn[{i}]" if listed else "reward_fn", function)
    try:
        calls = _calls(options["reward_fn"], options.get("reward_weights"))
    except RequestError as problem:
        raise ConfigError(str(problem)) from problem
    for call in calls:
        if missing := call.missing(columns):
            raise ConfigError(
                f"dataset: the reward function '{call.name}' needs '{missing[0]}', which is no column of the rows. "
                f"Beside {', '.join(ARGUMENTS)} there are {', '.join(sorted(columns)) or 'none'}."
            )


def check_rows(name: str, rows: Any, fields: Sequence[str]) -> Row:
    """Check the rows of "dataset:name" or the option `rows`; `fields[0]` is the prompt's column. Returns the first."""
    if (rows is not None) == bool(name):
        raise ConfigError('Rows are needed: either their path, as in "dataset:PATH", or the option rows.')
    first: Row = read_rows(rows if rows is not None else name, fields)[0]
    prompt = first[fields[0]]
    is_conversation = isinstance(prompt, list | tuple) and all(isinstance(each, Mapping) for each in prompt)
    if not prompt or not (isinstance(prompt, str) or is_conversation):
        raise ConfigError(refused(f"rows[0][{fields[0]!r}]", prompt, "a prompt: a text or a list of messages"))
    taken = [column for column in first if column in ARGUMENTS and column != fields[0]]
    if taken:
        bound = f"none of {', '.join(ARGUMENTS)}, which every reward function may get"
        raise ConfigError(refused("the column", taken[0], bound, "Rename it."))
    return first


class DatasetEnv:
    """An episode of one prompt and one answer.

    Its `info` has "row", the row's number, and, of a list of functions, "rewards": {function: its reward}. A function
    that raises, or returns anything but one finite number or None, ends the episode with a `RewardError`.
    """

    def __init__(
        self,
        rows: Rows,
        reward_fn: Rewarding,
        reward_weights: Sequence[float] | None = None,
        prompt_column: str = "prompt",
    ) -> None:
        self._rows, self._prompt_column = rows, prompt_column
        self._calls, self._is_list = _calls(reward_fn, reward_weights), is_listed(reward_fn)
        self._index, self._row = 0, dict[str, Any]()

    def reset(self, seed: int) -> Observation:
        """Show the row's prompt."""
        self._index, self._row = index_of(self._rows, seed), dict(row_of(self._rows, seed))
        [prompt] = copies(self._row[self._prompt_column], 1)
        return Observation(prompt, info={"row": self._index})

    def step(self, action: Action) -> Observation | Awaitable[Observation]:
        """Reward the answer."""
        columns = dict(self._row)
        prompt = columns.pop(self._prompt_column)
        answers: list[Any] = []
        try:
            for call in self._calls:
                texts, ids, is_chat = [action.text], [action.token_ids], not isinstance(prompt, str)
                arguments = reward_arguments(prompt, texts, ids, is_chat=is_chat)
                answers.append(call(arguments, {name: copies(value, 1) for name, value in columns.items()}))
        except BaseException:
            for answer in filter(iscoroutine, answers):
                answer.close()
            raise
        return self._await_answers(answers) if any(map(isawaitable, answers)) else self._end(answers)

    async def _await_answers(self, answers: list[Any]) -> Observation:
        async def value(answer: Any) -> Any:
            return await answer if isawaitable(answer) else answer

        return self._end(await asyncio.gather(*map(value, answers)))

    def _end(self, answers: Sequence[Iterable[float | None]]) -> Observation:
        where = f"row {self._index}"
        pairs = zip(self._calls, answers, strict=True)
        each = {call.name: checked_rewards(answer, 1, where, f"'{call.name}'") for call, answer in pairs}
        [total] = weighted_sum(self._calls, list(each.values()), where)
        info: dict[str, Any] = {"row": self._index}
        if self._is_list:
            info["rewards"] = {name: value for name, [value] in each.items()}
        return Observation(reward=total, terminated=True, info=info)


def _calls(reward_fn: Rewarding, weights: Sequence[float] | None) -> list[RewardCall]:
    def resolve(function: Callable[..., Any] | str) -> Any:
        return load(function) if isinstance(function, str) else function

    functions: Any = reward_fn
    return reward_calls([*map(resolve, functions)] if is_listed(functions) else resolve(functions), weights)
