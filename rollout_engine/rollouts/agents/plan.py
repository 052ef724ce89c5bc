"""Checks the arguments of rollouts over agents."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.base.structs import plain
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.episodes.plan import EPISODE_KEYS, as_seconds, environment_seed, pins_version
from rollout_engine.rollouts.plan import RolloutArguments, as_int, for_rollout
from rollout_engine.sessions.forced_params import forced_params
from rollout_engine.text.conversations import ChatOptions

_MAX_COUNT = 1_000_000
_MAX_IN_FLIGHT = 64
"""Agents that run at once, unless `max_in_flight` is given."""
_OF_REQUESTS = ("n", "seed", "output_kind", "detokenize")
_OPTIONS = (
    *("env", "num_episodes", "episode_timeout", "max_in_flight", "max_turns", "max_episode_tokens"),
    "pin_version",
)
"""Those of `EpisodeOptions` that agents have."""


class CollectOptions(ChatOptions, total=False):
    """Options of `RolloutPolicy.collect` in addition to its own arguments; those of agents are as in rollouts."""

    env: Any
    """ "agent:COMMAND" or an `Agent`, whose tasks the dataset has. No other environments."""
    max_turns: int
    max_episode_tokens: int | None
    episode_timeout: float | None
    pin_version: bool


class AgentPlan(msgspec.Struct, frozen=True):
    """Checked arguments of a rollout over agents."""

    agent: Agent
    params: SamplingParams
    """Parameters of every answer: they replace those that the agent asks for. The seed is set for each session."""
    seed: int
    """Root of all seeds."""
    tasks: list[Any] | dict[int, Any]
    """One for each start, by its number."""
    num_samples: int
    episode_timeout: float
    max_in_flight: int
    max_turns: int | None = None
    """Most answers of a session."""
    max_tokens: int | None = None
    """Most tokens of a session, prompts included."""
    starts: tuple[int, ...] | None = None
    """Numbers of the starts to play; None: all."""
    pins_version: bool = False
    """Whether all answers of a session are sampled under one policy version."""

    @classmethod
    def of(cls, frontend: Frontend, arguments: RolloutArguments, agent: Agent) -> "AgentPlan":
        """Check the arguments of `RolloutPolicy.rollout(tasks, params, env=Agent(...))`. Raises `RequestError`."""
        options = arguments.options
        _refuse_beside_agent(arguments)
        arguments = arguments.normalize()
        params = arguments.sampling_params
        if isinstance(params, list | tuple):
            raise RequestError.for_field("sampling_params", params, "one for all requests of all agents")
        checked = for_rollout(params, arguments.num_samples, None, 0)
        if checked.seed is not None:
            hint = "Each request draws with a seed of its own, made from rollout(seed=...)."
            raise RequestError.for_field("sampling_params.seed", checked.seed, "absent with env=Agent(...)", hint)
        in_flight = as_int("max_in_flight", options.get("max_in_flight"), 1, _MAX_COUNT)
        return cls(
            agent=agent,
            params=checked.clone(n=1, detokenize=True),
            seed=frontend.next_seed() if arguments.seed is None else arguments.seed,
            tasks=_tasks(arguments.prompts, options.get("num_episodes")),
            num_samples=checked.n,
            episode_timeout=as_seconds(options.get("episode_timeout")),
            max_in_flight=in_flight or _MAX_IN_FLIGHT,
            max_turns=as_int("max_turns", options.get("max_turns"), 1, _MAX_COUNT),
            max_tokens=as_int("max_episode_tokens", options.get("max_episode_tokens"), 2, _MAX_COUNT),
            pins_version=pins_version(options, checked),
        )

    @property
    def num_starts(self) -> int:
        """Starts to play."""
        return len(self.tasks) if self.starts is None else len(self.starts)

    @property
    def num_episodes(self) -> int:
        """Runs of the agent in all."""
        return self.num_starts * self.num_samples

    def place(self, key: int) -> tuple[int, int]:
        """(start, sample) of an episode."""
        start, member = divmod(key, self.num_samples)
        return (start if self.starts is None else self.starts[start]), member

    def env_seed(self, group: int) -> int:
        """ROLLOUT_SEED of the runs of one start, in [0, 2**31): all samples of a start have the same."""
        return environment_seed(self.seed, group)

    def episode_seed(self, group: int, member: int) -> int:
        """Base of the seeds of a session's requests."""
        return child_seed(mix(self.seed, group), member)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling params of every request, over those that the agent asks for."""
        return {name: each for name, each in forced_params(self.params).items() if name not in _OF_REQUESTS}

    @property
    def most_seconds(self) -> float:
        """The shorter of the two limits on a run."""
        return min(self.agent.timeout, self.episode_timeout)


def _tasks(given: Any, num_episodes: Any) -> list[Any]:
    """The tasks of the starts: those that were given, or None `num_episodes` times."""
    number = as_int("num_episodes", num_episodes, 1, _MAX_COUNT)
    if given is None:
        return [None] * (number or 1)
    if isinstance(given, str | bytes | Mapping):
        given = [given]
    try:
        tasks = list(given)
    except TypeError:
        raise RequestError.for_field(
            "prompts", given, "the agent's tasks, one for each start: a list of rows"
        ) from None
    if not tasks:
        raise RequestError.for_field("prompts", given, "at least one task")
    if number is not None and number != len(tasks):
        raise RequestError.for_field("num_episodes", number, f"{len(tasks)}, the number of tasks, or left out")
    return [as_task(task, f"prompts[{index}]") for index, task in enumerate(tasks)]


def as_task(given: Any, field: str) -> Any:
    """A task as an agent gets it, without numpy's numbers. Raises `RequestError` for one that JSON cannot hold."""
    task = plain(given)
    try:
        json.dumps(task, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError.for_field(field, task, f"data that JSON can hold ({problem})") from None
    return task


def _refuse_beside_agent(arguments: RolloutArguments) -> None:
    """Raise `RequestError` for arguments of other rollouts that were given together with an agent."""
    hints = {
        "reward_fn": "Agent(reward=...) gives the rewards of runs.",
        "reward_weights": "Agent(reward=...) gives the rewards of runs.",
        "columns": "Put them into the tasks: each is a row, which the agent gets whole.",
    }
    for name in ("columns", "reward_fn", "reward_weights", "oversample", "session_id", "lora_request"):
        if (value := getattr(arguments, name)) is not None:
            raise RequestError.for_field(name, value, "absent with env=Agent(...)", hints.get(name, ""))
    for name, value in arguments.options.items():
        if name not in _OPTIONS and value is not None:
            hint = "The agent decides on this in its own requests."
            if name in EPISODE_KEYS:
                hint = f"Agents have these options of episodes: {', '.join(_OPTIONS)}."
            raise RequestError.for_field(name, value, "absent with env=Agent(...)", hint)
