"""Checks the arguments of rollouts over environments."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

import msgspec

from envs_adapters.base import EnvSpec, Message
from envs_adapters.families import make_env
from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import as_lora_request
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.episodes.tool_functions import ToolFunction, tool_functions, tool_name
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.rollouts.plan import RolloutArguments, as_int, for_rollout
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.formats.choose import check_format_name

OnRewrite = Literal["refuse", "branch"]
OnResume = Literal["replay", "anew"]
Opponent = Frontend | Callable[[list[Message]], str]

_MAX_COUNT = 1_000_000
_ENV_SEEDS = 1 << 34
"""Offset beyond the indexes of samples."""
_MAX_FIRST_SEED = (1 << 31) - _MAX_COUNT


class EpisodeOptions(TypedDict, total=False):
    """Options of rollouts over environments."""

    env: Any
    """A class or function that makes an environment (`envs_adapters.Env`), the name of one ("family:name"), or the
    result of `envs_adapters.make_env`. Each episode has an environment of its own. Or "agent:COMMAND" or an `Agent`: a
    program or function that talks to the policy over HTTP, whose tasks are the `prompts`."""
    num_episodes: int
    """Starts: each is played `num_samples` times from the same state, which makes a group. 1 unless given."""
    max_turns: int
    """Answers of one seat at most, 8 unless given; then the episode is truncated."""
    max_episode_tokens: int | None
    """Tokens of a row at most, prompt included; then the episode is truncated. None: as many as the model takes."""
    episode_thinking_budget: int | None
    """Tokens that a seat samples inside thinking at most, in all its turns together; then `thinking_end` is forced, as
    by `SamplingParams.thinking_budget`, which bounds each turn for itself. None: no bound."""
    episode_timeout: float | None
    """Seconds of one episode at most, waiting included; then it is truncated. None: no limit."""
    on_rewrite: OnRewrite
    """If the chat template rewrites earlier turns (drops their thinking, for example): "refuse", the default, ends the
    episode with an error, before anything is sampled if that is certain; "branch" begins a row of its own for each turn
    whose past was rewritten."""
    tool_format: str | None
    """How the policy writes tool calls: a name of docs/environments.md, for example "hermes"; None: as the template
    teaches."""
    seats: Mapping[int, Any] | None
    """Who plays which seat of an environment of several players: another `RolloutPolicy`, or a function from the
    seat's messages to a text. Seats not named are played by this policy (self-play)."""
    max_in_flight: int | None
    """Episodes that run at once; None: all."""
    journal: str | os.PathLike[str] | JournalOptions | None
    """A directory that keeps this rollout: the same call continues it in another process (docs/durable.md)."""
    on_resume: OnResume
    """For episodes of the journal that have not ended: "replay", the default, plays them again in new environments from
    seed and actions, compares, and continues behind their last turns; "anew" begins them anew."""
    pin_version: bool
    """True: all turns of an episode are sampled under the policy version that is live when it begins. An update ends
    the episode after the turns it has, truncated (`ended_by` is "policy_version"); one without a turn begins under the
    new version. False, the default: turns after an update are of its version."""


EPISODE_KEYS = tuple(EpisodeOptions.__annotations__)


class RolloutOptions(ChatOptions, EpisodeOptions, total=False):
    """Options of `RolloutPolicy.rollout` in addition to its own arguments."""


class EpisodePlan(msgspec.Struct, frozen=True):
    """Checked arguments of a rollout over environments."""

    spec: EnvSpec
    params: SamplingParams
    """Parameters of every answer; the seed is set for each."""
    seed: int
    """Root of all seeds."""
    num_episodes: int
    num_samples: int
    max_turns: int
    max_episode_tokens: int | None
    episode_thinking_budget: int | None
    episode_timeout: float
    on_rewrite: OnRewrite
    tool_format: str | None
    max_in_flight: int
    opponents: dict[int, Opponent]
    """Players of the seats that this policy does not play."""
    tools: dict[str, ToolFunction]
    """Functions that the rollout calls, for every environment."""
    chat: ChatOptions
    """Options of chat templates, without tools."""
    lora: str | None = None
    """Name of the adapter that this policy plays under."""
    first_env_seed: int | None = None
    """Seed of the environments of start 0; None: one that `seed` determines."""
    starts: tuple[int, ...] | None = None
    """Numbers of the `num_episodes` starts to play; None: from 0 on."""
    journal: JournalOptions | None = None
    on_resume: OnResume = "replay"
    draws_seed: bool = False
    """Whether the seed is one of the engine's, which a journal's replaces."""
    pins_version: bool = False
    """Whether all turns of an episode are sampled under one policy version."""

    @classmethod
    def of(cls, frontend: Frontend, arguments: RolloutArguments) -> "EpisodePlan":
        """Check the arguments of `RolloutPolicy.rollout(env=...)`. Raises `RequestError` if one does not fit."""
        chat, options = _divide_options(arguments.options)
        spec = _spec(options["env"])  # an unknown name first: the others may fit the right one
        _refuse_beside_env(arguments)
        arguments = arguments.normalize()
        params = arguments.sampling_params
        if isinstance(params, list | tuple):
            raise RequestError.for_field("sampling_params", params, "one for all turns of all episodes")
        checked = for_rollout(params, arguments.num_samples, None, 0)
        if checked.seed is not None:
            hint = "Each turn draws with a seed of its own, made from rollout(seed=...)."
            raise RequestError.for_field("sampling_params.seed", checked.seed, "absent with env=", hint)
        if checked.return_hidden_states == "all":
            hint = "A turn's prompt holds the turns before it: 'sampled' gives the states of all that was sampled."
            raise RequestError.for_field("sampling_params.return_hidden_states", "all", "'sampled' with env=", hint)
        on_rewrite, tool_format = options.get("on_rewrite", "refuse"), options.get("tool_format")
        if on_rewrite not in get_args(OnRewrite):
            raise RequestError.for_field("on_rewrite", on_rewrite, " or ".join(map(repr, get_args(OnRewrite))))
        if (on_resume := options.get("on_resume", "replay")) not in get_args(OnResume):
            raise RequestError.for_field("on_resume", on_resume, " or ".join(map(repr, get_args(OnResume))))
        if tool_format is not None:
            check_format_name(tool_format)
        tools = chat.pop("tools", None) or ()
        budget = as_int("episode_thinking_budget", options.get("episode_thinking_budget"), 0, _MAX_COUNT)
        own = budget if checked.thinking_budget is None else checked.thinking_budget
        return cls(
            spec=spec,
            params=checked.clone(n=1, detokenize=True, thinking_budget=own),
            seed=frontend.next_seed() if arguments.seed is None else arguments.seed,
            num_episodes=_count(options, "num_episodes", 1),
            num_samples=checked.n,
            max_turns=_count(options, "max_turns", 8),
            max_episode_tokens=as_int("max_episode_tokens", options.get("max_episode_tokens"), 2, _MAX_COUNT),
            episode_thinking_budget=budget,
            episode_timeout=as_seconds(options.get("episode_timeout")),
            on_rewrite=on_rewrite,
            tool_format=tool_format,
            max_in_flight=_count(options, "max_in_flight", _MAX_COUNT),
            opponents=_opponents(options.get("seats") or {}),
            tools=_functions(tools),
            chat=chat,
            pins_version=pins_version(options, checked),
            lora=None if arguments.lora_request is None else as_lora_request(arguments.lora_request).name,
            journal=None if options.get("journal") is None else JournalOptions.of(options["journal"]),
            on_resume=on_resume,
            draws_seed=arguments.seed is None,
        )

    def env_seed(self, group: int) -> int:
        """Seed of the environments of one start, in [0, 2**31): starts have successive ones.

        So n starts visit each of n rows once, if an environment plays row `seed % n`.
        """
        return environment_seed(self.seed, group) if self.first_env_seed is None else self.first_env_seed + group

    def episode_seed(self, group: int, member: int) -> int:
        """Seed of an episode's first answer: that of the same sample of the same prompt in `rollout(seed=...)`."""
        return child_seed(mix(self.seed, group), member)


def environment_seed(root: int, group: int) -> int:
    """Seed of the environments of one start, in a rollout whose root of all seeds is `root`."""
    return mix(root, _ENV_SEEDS) % _MAX_FIRST_SEED + group


def _spec(env: Any) -> EnvSpec:
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, str):
        return make_env(env)
    if not callable(env):
        hint = "Give the class itself, a function that makes one, or make_env(...): each episode has its own."
        raise RequestError.for_field("env", env, "what makes an environment", hint)
    return EnvSpec(env, name=getattr(env, "__qualname__", type(env).__qualname__))


def _count(options: Mapping[str, Any], name: str, default: int) -> int:
    return as_int(name, options.get(name), 1, _MAX_COUNT) or default


def as_seconds(value: Any) -> float:
    """Check `episode_timeout`; None is no limit. Raises `RequestError`."""
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise RequestError.for_field("episode_timeout", value, "a positive number of seconds")
    return float(value)


def pins_version(options: Mapping[str, Any], params: SamplingParams) -> bool:
    """Check `pin_version`. Raises `RequestError`."""
    pins = options.get("pin_version", False)
    if not isinstance(pins, bool):
        raise RequestError.for_field("pin_version", pins, "True or False")
    if pins and params.policy_version is not None:
        bound = "False with policy_version, which is the version of all episodes"
        raise RequestError.for_field("pin_version", pins, bound)
    return pins


def _functions(tools: Sequence[Any]) -> dict[str, ToolFunction]:
    functions = tool_functions(tools)
    for tool in tools:
        if tool_name(tool) not in functions:
            hint = "An environment that answers calls by its `step` gives the schemas itself, as its `tools`."
            raise RequestError.for_field("tools", tool, "a list of functions, which the rollout calls", hint)
    return functions


def _opponents(seats: Any) -> dict[int, Opponent]:
    if not isinstance(seats, Mapping):
        raise RequestError.for_field("seats", seats, "a dict: {seat: another policy, or a function}")
    opponents: dict[int, Opponent] = {}
    for seat, player in seats.items():
        if type(seat) is not int or seat < 0:
            raise RequestError.for_field("seats", seat, "numbers of seats, from 0")
        player = getattr(player, "frontend", player)
        if not isinstance(player, Frontend) and not callable(player):
            raise RequestError.for_field(f"seats[{seat}]", player, "a RolloutPolicy, or a function of its messages")
        opponents[seat] = player
    return opponents


def _divide_options(options: Mapping[str, Any]) -> tuple[ChatOptions, EpisodeOptions]:
    """(chat options, episode options) of the keyword arguments of a rollout. Raises `RequestError` without env=."""
    chat: Any = {name: value for name, value in options.items() if name not in EPISODE_KEYS}
    episodes: Any = {name: value for name, value in options.items() if name in EPISODE_KEYS}
    if episodes and episodes.get("env") is None:
        [name, *_] = sorted(episodes.keys() - {"env"}) or ["env"]
        raise RequestError(f"{name}= needs env=, the environment of the episodes.", field=name)
    return chat, episodes


def refuse_environments(verb: str, options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for options of environments given to a verb that plays none."""
    for name in EPISODE_KEYS:
        if name in options:
            text = f"'{name}' is not an argument of {verb}, which takes prompts: rollout(None, params, env=...) plays."
            raise RequestError(text, field=name, value=options[name])


def _refuse_beside_env(arguments: RolloutArguments) -> None:
    """Raise `RequestError` for arguments of a rollout of prompts that were given together with env=."""
    hints = {
        "prompts": "The environment gives them: rollout(None, params, env=...).",
        "reward_fn": "The environment gives rewards; make_env('dataset:...', reward_fn=...) makes one of prompts.",
        "columns": "The environment knows its own data.",
    }
    for name in ("prompts", "columns", "reward_fn", "reward_weights", "oversample", "session_id"):
        if (value := getattr(arguments, name)) is not None:
            raise RequestError.for_field(name, value, "absent with env=", hints.get(name, ""))
