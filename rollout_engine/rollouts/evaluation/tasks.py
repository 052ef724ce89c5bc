"""Tasks of an evaluation: prompts with reward functions, or environments."""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from PIL import Image

from envs_adapters.base import EnvSpec, load
from envs_adapters.families import make_env
from envs_adapters.rows import RowTable, check_function, read_rows
from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.base.pictures import Picture
from rollout_engine.base.structs import UserStruct
from rollout_engine.batches.reward_functions import is_listed
from rollout_engine.rollouts.agents.agent import PREFIX, Agent, as_agent
from rollout_engine.rollouts.episodes.plan import EPISODE_KEYS
from rollout_engine.rollouts.episodes.tool_functions import tool_functions, tool_schemas
from rollout_engine.rollouts.plan import split_row

_NUM_STARTS = 100
"""Prompts of an environment, unless given."""
_OF_EVALUATION = ("env", "num_episodes")
"""Options of episodes that a task sets by other fields."""


class EvalTask(UserStruct, frozen=True, kw_only=True):  # type: ignore[metaclass]
    """One task of an evaluation: rows with a reward function, or an environment."""

    error_class = RequestError
    readings = {"rows": lambda rows: str(rows) if isinstance(rows, os.PathLike) else rows}

    name: str = ""
    """Name in the results. "" if the environment or the file gives it one."""
    rows: Any = None
    """Prompts, or dicts with a prompt and columns for the reward function; a dict of columns; a `datasets.Dataset`; or
    the path of a JSONL file."""
    prompt_column: str = "prompt"
    """Key of the prompt in a row; rows with "messages" or "prompt_token_ids" need none."""
    reward_fn: Any = None
    """The reward, as in `rollout`: a function, "module:function", or a list of them; for rows."""
    reward_weights: list[float] | None = None
    env: Any = None
    """In place of rows: as in `rollout(env=...)`, such as "reasoning_gym:spell_backward". Prompt i is the start that
    `reset(seed=first_seed + i)` gives. "agent:COMMAND" and an `Agent` take rows too, as their tasks."""
    env_options: dict[str, Any] = {}
    """Options of `make_env` if `env` is a name."""
    episodes: dict[str, Any] = {}
    """Options of episodes, such as {"max_turns": 4}."""
    chat: dict[str, Any] = {}
    """Options of chat templates, as in `rollout`."""
    num_prompts: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Number of prompts, from the first on; None: all rows, or 100 starts of an environment."""
    first_seed: Annotated[int, msgspec.Meta(ge=0, le=2**30)] = 0
    correct_from: float = 1.0
    """A sample is correct, for pass@k and maj@k, if its reward is at least this."""
    answer: Any = None
    """Finds the answer that a sample votes for in maj@k: a function of its text, or "module:function", that returns a
    text, or None if there is none. Without it the whole text votes, without space around it; of environments, the
    "answer" of their `info` votes."""

    def check(self) -> None:
        is_agent = isinstance(self.env, Agent) or (isinstance(self.env, str) and self.env.startswith(PREFIX))
        if (self.rows is None) == (self.env is None) and not is_agent:
            raise RequestError("EvalTask needs rows= (with reward_fn=) or env=, one of them.", field="rows")
        if is_agent and self.first_seed:
            raise RequestError.for_field("first_seed", self.first_seed, "0 for agents, whose rows are their starts")
        if self.env is None and self.reward_fn is None:
            raise RequestError("reward_fn= is needed beside rows=: it says how good a sample is.", field="reward_fn")
        if self.env is not None and self.reward_fn is not None:
            hint = "The environment gives the rewards."
            raise RequestError.for_field("reward_fn", self.reward_fn, "absent beside env=", hint)
        if self.env_options and not isinstance(self.env, str):
            raise RequestError.for_field("env_options", self.env_options, 'absent unless env is a name, "family:name"')
        known = [name for name in EPISODE_KEYS if name not in _OF_EVALUATION]
        for name in self.episodes:
            if name not in known:
                raise RequestError(unknown_name("option of episodes", name, known), field="episodes")


class PreparedTask(NamedTuple):
    """A task whose rows have been read."""

    task: EvalTask
    name: str
    num_prompts: int
    prompts: list[Any] | None
    """None for environments; the tasks of agents."""
    columns: dict[str, list[Any]]
    reward_fn: Any
    spec: EnvSpec | Agent | None
    answer: Callable[[str], Any] | None
    digest: str
    """Digest of prompts and columns, or of the environment and its options."""


def prepare_tasks(tasks: Any) -> list[PreparedTask]:
    """Read the tasks of `RolloutPolicy.evaluate`. Raises `RequestError` or `ConfigError`, naming the task.

    `tasks`: one or a list of `EvalTask`s, dicts of their fields, names of environments ("family:name", or a dataset of
    reasoning_gym alone), or factories of environments; or a dict from names to these. Those of a list that are prepared
    already are not read again.
    """
    if isinstance(tasks, Mapping) and not {"rows", "env"} & tasks.keys():
        listed: list[EvalTask | PreparedTask] = [_name_task(str(name), task) for name, task in tasks.items()]
    else:
        given = tasks if isinstance(tasks, list | tuple) else [tasks]
        listed = [task if isinstance(task, PreparedTask) else _as_task(task) for task in given]
    if not listed:
        raise RequestError.for_field("tasks", tasks, "at least one task")
    prepared = [task if isinstance(task, PreparedTask) else _prepare_task(task) for task in listed]
    names = [task.name for task in prepared]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError.for_field("tasks", twice, "different names", "Two tasks have this one: give them name=.")
    return prepared


def _as_task(given: Any) -> EvalTask:
    if isinstance(given, EvalTask):
        return given
    if isinstance(given, Mapping):
        return EvalTask(**{str(name): value for name, value in given.items()})
    return EvalTask(env=given)


def _name_task(name: str, given: Any) -> EvalTask:
    task = _as_task(given)
    renamed: EvalTask = task if task.name else task.clone(name=name)
    return renamed


def _prepare_task(task: EvalTask) -> PreparedTask:
    answer = None if task.answer is None else _function("answer", task.answer)
    if (agent := as_agent(task.env)) is not None:
        tasks = _tasks(task)
        told = [agent.name, tasks, _plain(task.episodes)]
        return PreparedTask(
            task, task.name or agent.name, len(tasks), tasks, {}, None, agent, answer, _digest(task, told)
        )
    if task.env is not None:
        spec = _spec(task)
        told = [spec.name, _plain(spec.arguments), task.first_seed, _plain(task.episodes)]
        name = task.name or spec.name
        count = task.num_prompts or _NUM_STARTS
        return PreparedTask(task, name, count, None, {}, None, spec, answer, _digest(task, told))
    prompts, columns = _read(task)
    name = task.name or (Path(task.rows).stem if isinstance(task.rows, str) else "rows")
    told = [_plain(prompts), {column: _plain(values) for column, values in columns.items()}]
    functions = task.reward_fn if is_listed(task.reward_fn) else [task.reward_fn]
    loaded = [_function("reward_fn", function) for function in functions]
    reward_fn = loaded if is_listed(task.reward_fn) else loaded[0]
    digest = _digest(task, told)
    return PreparedTask(task, name, len(prompts), prompts, columns, reward_fn, None, answer, digest)


def _spec(task: EvalTask) -> EnvSpec:
    if isinstance(task.env, EnvSpec):
        return task.env
    if isinstance(task.env, str):
        return make_env(task.env if ":" in task.env else f"reasoning_gym:{task.env}", **task.env_options)
    return make_env(task.env)


def _tasks(task: EvalTask) -> list[Any]:
    """The tasks of an agent: the rows, or None for each start."""
    if task.rows is None:
        return [None] * (task.num_prompts or _NUM_STARTS)
    rows = _listed(task)
    return [rows[index] for index in range(min(len(rows), task.num_prompts or len(rows)))]


def _read(task: EvalTask) -> tuple[list[Any], dict[str, list[Any]]]:
    rows = _listed(task)
    count = min(len(rows), task.num_prompts or len(rows))
    split = [_split(index, rows[index], task.prompt_column) for index in range(count)]
    names = split[0][1].keys()
    for index, (_, columns) in enumerate(split):
        if columns.keys() != names:
            raise RequestError.for_field(
                f"rows[{index}]", sorted(columns), f"with the columns of rows[0], {sorted(names)}"
            )
    return [prompt for prompt, _ in split], {name: [columns[name] for _, columns in split] for name in names}


def _listed(task: EvalTask) -> Any:
    """The rows as something with a length and items. Raises `RequestError`."""
    rows = task.rows
    if isinstance(rows, str | Mapping | RowTable):
        rows = read_rows(rows)
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or not len(rows):
        bound = (
            "at least one row: a list of prompts or of dicts with a prompt, a dict of columns, a data set, or a path"
        )
        raise RequestError.for_field("rows", task.rows, bound)
    return rows


def _split(index: int, row: Any, prompt_column: str) -> tuple[Any, dict[str, Any]]:
    if isinstance(row, Mapping) and prompt_column in row and prompt_column != "prompt":
        row = {"prompt": row[prompt_column]} | {name: value for name, value in row.items() if name != prompt_column}
    prompt, columns = split_row(row)
    if isinstance(prompt, Mapping) and not columns and not {"prompt", "messages", "prompt_token_ids"} & prompt.keys():
        hint = f"It has {sorted(prompt)}; prompt_column= names another key."
        raise RequestError.for_field(f"rows[{index}]", dict(prompt), f"with the key {prompt_column!r}", hint)
    return prompt, columns


def _function(field: str, given: Any) -> Any:
    check_function(field, given)
    return load(given)


def _digest(task: EvalTask, told: Any) -> str:
    described = [task.correct_from, _plain(_with_schemas(task.chat)), told]
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _with_schemas(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with the schemas of tools that are functions: these are in the prompts."""
    tools = options.get("tools")
    if not isinstance(tools, list | tuple):
        return options
    return {**options, "tools": tool_schemas(tools, tool_functions(tools))}


def _picture_file(part: Mapping[Any, Any]) -> dict[str, str]:
    """The digest of the file that a picture of a conversation names by its path; empty for anything else."""
    path = part.get("image")
    if part.get("type") != "image" or not isinstance(path, str | os.PathLike) or not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        return {"sha256": file_digest(file, "sha256").hexdigest()}


def _plain(value: Any) -> Any:
    """`value` for a digest that is the same in every process: functions and objects by name or type, not by address."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()} | _picture_file(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=repr)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | os.PathLike):
        return repr(value)
    if isinstance(value, Image.Image):
        return [value.mode, list(value.size), sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Picture):
        return value.digest.hex()
    return (
        _plain(value.tolist()) if hasattr(value, "tolist") else getattr(value, "__qualname__", type(value).__qualname__)
    )
