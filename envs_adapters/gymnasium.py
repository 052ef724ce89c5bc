"""Environments of gymnasium: "gymnasium:FrozenLake-v1", or any other of text or of discrete actions.

    make_env("gymnasium:FrozenLake-v1", actions=["left", "down", "right", "up"], is_slippery=False)

The policy reads the environment's text (`render_mode="ansi"`) if it prints, else its observations as text. In
that text, colours become marks, as they may be all that shows the player's place: [x] has a coloured background,
<x> is coloured, *x* is bold. With `picture` it sees a picture:

    make_env("gymnasium:CartPole-v1", actions=["left", "right"], picture="render")
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, TypeAlias, get_args

from envs_adapters.base import Action, Messages, Observation, load
from envs_adapters.gymnasium_text import ActionReader, mark_colours, text_of
from envs_adapters.rows import check_function
from rollout_engine.base.errors import ConfigError, refused

TRAITS: dict[str, Any] = {}

Source: TypeAlias = Literal["render", "observation"]
"""The source of a picture of an environment."""

_INVALID_REWARD = -1.0


def make(
    name: str,
    *,
    actions: Sequence[str] | None = None,
    instructions: str = "",
    invalid_reward: float = _INVALID_REWARD,
    action_from_text: Callable[[str], Any] | str | None = None,
    observation_to_text: Callable[[Any], str] | str | None = None,
    picture: Source | None = None,
    reset_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> "GymnasiumEnv":
    """One environment.

    Args:
        name: as gymnasium registers it; "my_module:MyEnv-v0" imports a module that registers it.
        actions: names of discrete actions, in their order. The policy may answer with a name or a number.
        instructions: stand before the first observation.
        invalid_reward: of an answer that is no action. It is reported and costs a step: `max_episode_steps`
            counts it, and the environment's state stays. -1 by default, the cost of a step in many environments, so
            that an empty answer never pays.
        action_from_text: makes an action of the policy's answer; a function, or "module:function". None or a
            ValueError: the answer is no action. Without it actions must be discrete and end the answer, or are text.
        observation_to_text: writes an observation; a function, or "module:function".
        picture: show a picture in place of text: "render" for the result of `render()` (`render_mode="rgb_array"`
            unless another is given), "observation" for observations that are images (uint8 [H, W], [H, W, 3] or
            [H, W, 4]). With `observation_to_text` the text follows the picture. An engine takes as many pictures in
            a prompt as `EngineConfig(max_prompt_pictures=...)`: one for each step, and one more.
        reset_options: `options` of the environment's `reset`.
        options: of `gymnasium.make`, for example max_episode_steps=20; render_mode=None shows observations even if the
            environment could print.
    """
    mode = "rgb_array" if picture == "render" else "ansi" if picture is None and observation_to_text is None else ""
    env = _make(name, options, mode)
    to_text = None if observation_to_text is None else load(observation_to_text)
    if action_from_text is not None:
        read: Callable[[str], Any] = load(action_from_text)
        request = ""
    else:
        reader = _reader(name, env, actions)
        read = str if reader is None else reader.read
        request = "" if reader is None else reader.request
    return GymnasiumEnv(env, read, instructions, to_text, invalid_reward, reset_options, request, picture)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the environment exists, takes the options, and can be played by text."""
    import gymnasium

    for option in ("action_from_text", "observation_to_text"):
        if options.get(option) is not None:
            check_function(option, options[option])
    if options.get("actions") is not None and options.get("action_from_text") is not None:
        raise ConfigError(refused("actions", options["actions"], "absent where action_from_text reads the actions"))
    if options.get("picture") not in (None, *get_args(Source)):
        raise ConfigError(refused("picture", options["picture"], " or ".join(map(repr, get_args(Source)))))
    if not isinstance(options.get("instructions", ""), str):
        raise ConfigError(refused("instructions", options["instructions"], "a text"))
    reward = options.get("invalid_reward", _INVALID_REWARD)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        raise ConfigError(refused("invalid_reward", reward, "a finite number"))
    try:
        env = make(name, **options)
        env.reset(0)
        env.close()
    except ConfigError:
        raise
    except gymnasium.error.UnregisteredEnv as problem:
        raise ConfigError(f"gymnasium:{name}: {problem}") from problem
    except Exception as problem:
        text = f"gymnasium:{name} refuses {dict(options)}: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem


class GymnasiumEnv:
    """An episode of a `gymnasium.Env`. The `info` of an answer that is no action is {"is_invalid": True}.

    `terminated` and `truncated` are the environment's own.
    """

    def __init__(
        self,
        env: Any,
        read: Callable[[str], Any],
        instructions: str = "",
        to_text: Callable[[Any], str] | None = None,
        invalid_reward: float = _INVALID_REWARD,
        reset_options: Mapping[str, Any] | None = None,
        request: str = "",
        picture: Source | None = None,
    ) -> None:
        """`read` parses an answer into an action; `request` is the text that lists the legal actions."""
        self._env, self._read, self._to_text = env, read, to_text
        self._instructions, self._request = instructions, request
        self._invalid_reward, self._reset_options = invalid_reward, reset_options
        self._picture = picture
        self._num_steps = 0
        self._max_steps: int | None = env.spec.max_episode_steps

    def reset(self, seed: int) -> Observation:
        """Start the episode; the first message ends with the actions that there are."""
        options = None if self._reset_options is None else dict(self._reset_options)
        observation, info = self._env.reset(seed=seed, options=options)
        return Observation(self._show(observation, self._instructions, self._request), info=info)

    def step(self, action: Action) -> Observation:
        """Take an action, or answer that it is none."""
        self._num_steps += 1
        is_last = self._max_steps is not None and self._num_steps >= self._max_steps
        try:
            read = self._read(action.text)
        except ValueError:
            read = None
        if read is None:
            said = f"That is no action. {self._request}".strip()
            return Observation(said, self._invalid_reward, truncated=is_last, info={"is_invalid": True})
        observation, reward, terminated, truncated, info = self._env.step(read)
        ended = bool(terminated)
        is_cut = bool(truncated) or is_last and not ended
        return Observation(self._show(observation), float(reward), ended, is_cut, info)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _show(self, observation: Any, before: str = "", after: str = "") -> Messages:
        """An observation between two texts, as the policy reads or sees it."""
        if self._picture is None:
            return "\n\n".join(part for part in (before, self._text(observation), after) if part)
        image = self._env.render() if self._picture == "render" else observation
        texts = [before, "" if self._to_text is None else self._to_text(observation), after]
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        content = [parts[0], {"type": "image", "image": image}, *parts[1:]]
        return [{"role": "user", "content": [part for part in content if part.get("text") != ""]}]

    def _text(self, observation: Any) -> str:
        if self._to_text is not None:
            return self._to_text(observation)
        return mark_colours(self._env.render()) if self._env.render_mode == "ansi" else text_of(observation)


def _make(name: str, options: Mapping[str, Any], mode: str) -> Any:
    """Make the environment, with this mode of rendering if it has it and no other one is asked for."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    module, _, env_id = name.rpartition(":")
    if module:
        import_module(module)
    creator: Any = gymnasium.spec(env_id).entry_point
    modes = getattr(load_env_creator(creator) if isinstance(creator, str) else creator, "metadata", {})
    rendering = {"render_mode": mode} if mode in modes.get("render_modes", ()) else {}
    return gymnasium.make(env_id, **{"disable_env_checker": True, **rendering, **options})


def _reader(name: str, env: Any, names: Sequence[str] | None) -> ActionReader | None:
    """The reader of the environment's actions; None if they are texts. Raises `ConfigError` for others."""
    from gymnasium import spaces

    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return ActionReader(int(space.start), int(space.n), names)
    if not isinstance(space, spaces.Text):
        hint = "action_from_text=... can make them of texts"
        raise ConfigError(f"gymnasium:{name}: its actions are neither discrete nor texts, but {space}: {hint}.")
    if names is not None:
        raise ConfigError(refused("actions", names, "absent: the environment's actions are texts"))
    return None
