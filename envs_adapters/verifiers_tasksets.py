"""Tasksets of verifiers 0.4, scored directly: one prompt, one answer, and the task's own rewards and metrics.

No program, sandbox or server is started, so a task that needs one is refused: one with tools, a container, several
agents, an `@intercept`, or a hook or reward that takes the `runtime`.
"""

import inspect
import json
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from envs_adapters.base import Action, Message, Observation
from rollout_engine.base.errors import ConfigError, refused, unknown_name

_lock = threading.Lock()
"""Held while a taskset is loaded, so that it is loaded once."""


def check(name: str, config: Mapping[str, Any], max_tasks: int | None) -> dict[str, Any]:
    """Raise `ConfigError` unless the taskset exists, and all its tasks can be scored directly."""
    try:
        load_tasks(name, config, max_tasks)
    except ConfigError:
        raise
    except Exception as problem:
        text = f"verifiers:{name} refuses {dict(config)}: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    return {"is_single_turn": True}


class TaskEnv:
    """An episode of one task: `tasks[seed % len(tasks)]`.

    The reward is the sum of weight times reward, as `Trace.reward`. The last `info` has "task", the task's number,
    "rewards", {name: weight times reward}, and "metrics". Judges that call a model of their own do so.
    """

    def __init__(self, name: str, config: Mapping[str, Any], max_tasks: int | None) -> None:
        self._tasks = load_tasks(name, config, max_tasks)
        self._task: Any = None
        self._trace: Any = None

    async def reset(self, seed: int) -> list[Message]:
        """Prepare the task and show its prompt."""
        self._task = self._tasks[seed % len(self._tasks)]
        self._trace = _new_trace(self._task)
        if _is_overridden(self._task, "setup"):
            await self._task.setup(trace=self._trace)
        return [message.model_dump(exclude_none=True) for message in _prompt(self._task)]

    async def step(self, action: Action) -> Observation:
        """Score the answer.

        The trace that rewards see has the answer as text and its number of tokens; tokens of the prompt count as 0.
        """
        trace = self._trace
        _add_answer(trace, _prompt(self._task), action)
        if _is_overridden(self._task, "finalize"):
            await self._task.finalize(trace=trace)
        await self._task.score(trace)
        info = {
            "task": self._task.data.idx,
            "rewards": {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
            "metrics": dict(trace.metrics),
        }
        return Observation(reward=trace.reward, terminated=True, info=info)


def load_tasks(name: str, config: Mapping[str, Any], max_tasks: int | None) -> list[Any]:
    """The tasks of a taskset, loaded once. Raises `ConfigError` for one that does not exist, or is not single-turn."""
    with _lock:
        return _load_tasks(name, json.dumps(config, sort_keys=True), max_tasks)


@lru_cache(maxsize=8)
def _load_tasks(name: str, config: str, max_tasks: int | None) -> list[Any]:
    from verifiers.v1 import SingleAgentEnv
    from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type

    try:
        kind = taskset_config_type(name)
    except (ModuleNotFoundError, TypeError, AttributeError) as problem:
        raise ConfigError(f"verifiers:{name}: there is no such taskset: {problem}") from problem
    options = json.loads(config)
    for option in options:
        if option not in kind.model_fields:
            raise ConfigError(f"verifiers:{name}: {unknown_name('option', option, kind.model_fields)}")
    if environment_class(name) is not SingleAgentEnv:
        raise ConfigError(f"verifiers:{name} has an environment of its own, which verifiers itself must run.")
    taskset = load_taskset(kind(id=name, **options))
    if max_tasks is not None:
        taskset = taskset.take(max_tasks)
    if not taskset.bounded:
        raise ConfigError(f"verifiers:{name} is infinite: give max_tasks=...")
    tasks = list(taskset)
    if not tasks:
        raise ConfigError(f"verifiers:{name} has no tasks.")
    if type(taskset).toolsets(taskset.config):
        raise ConfigError(f"verifiers:{name} has tools, whose servers verifiers itself must run.")
    for task in tasks:
        _require_single_turn(f"verifiers:{name}: task {task.data.idx}", task)
    return tasks


def _require_single_turn(where: str, task: Any) -> None:
    from verifiers.v1.utils.decorators import discover_decorated

    reason = None
    hooks = [getattr(task, hook) for hook in ("setup", "finalize") if _is_overridden(task, hook)]
    hooks += [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    needing = [hook for hook in hooks if _needs_runtime(hook)]
    if task.NEEDS_CONTAINER or task.data.image is not None:
        reason = "a container"
    elif type(task).toolsets(task.config):
        reason = "tools"
    elif needing:
        reason = f"a runtime, for its '{needing[0].__name__}'"
    elif discover_decorated(task, "intercept"):
        reason = "an @intercept"
    if reason is not None:
        raise ConfigError(f"{where} needs {reason}: verifiers itself must run it.")
    if not task.data.prompt:
        raise ConfigError(refused(f"{where}: prompt", task.data.prompt, "a text or messages"))


def _is_overridden(task: Any, hook: str) -> bool:
    from verifiers.v1 import Task

    return getattr(type(task), hook) is not getattr(Task, hook)


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _prompt(task: Any) -> list[Any]:
    from verifiers.v1 import SystemMessage, UserMessage

    data = task.data
    said = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return said if data.system_prompt is None else [SystemMessage(content=data.system_prompt), *said]


def _new_trace(task: Any) -> Any:
    from verifiers.v1 import AgentConfig
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    described = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return Trace(task=described, state=state_cls(type(task))(), agent=AgentInfo(config=AgentConfig()))


def _add_answer(trace: Any, prompt: list[Any], action: Action) -> None:
    from verifiers.v1 import AssistantMessage
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.trace import ModelCall
    from verifiers.v1.types import Response, Usage

    reason = "length" if action.is_cut else "stop"
    usage = Usage(prompt_tokens=0, completion_tokens=len(action.token_ids))
    message = AssistantMessage(content=action.text)
    answer = Response(
        id=trace.id, created=int(time.time()), model="policy", message=message, finish_reason=reason, usage=usage
    )
    node = prepare_turn(trace, prompt).commit(answer)
    trace.calls.append(ModelCall(node=node, model="policy", finish_reason=reason, usage=usage))
    trace.stop("agent_completed")
