"""Environments of TorchRL: "torchrl:MODULE:FACTORY", a function or class of yours that returns an `EnvBase`.

    make_env("torchrl:my_envs:make_gsm8k", max_steps=1)
    make_env("torchrl:torchrl.envs.llm:ChatEnv", rows="queries.jsonl", batch_size=[1], input_mode="history")

It is a `ChatEnv` with input_mode="history", whatever its transforms, or an environment whose observation and action
are texts (`NonTensor` specs). It plays one episode at a time: its batch_size is () or (1,). Episodes run in worker
processes: chats need `tensordict.set_list_to_stack`, which holds for a whole process, and many environments draw from
torch's global generator, which has the episode's seed there.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from envs_adapters.base import Action, Message, Observation, load
from envs_adapters.rows import Rows, check_function, read_rows, row_of
from rollout_engine.base.errors import ConfigError, refused

TRAITS: dict[str, Any] = {"placement": "processes"}


def make(name: str, *, rows: Rows | None = None, **options: Any) -> "TorchRLEnv":
    """One environment.

    Args:
        rows: input of `reset`, a column a key, for environments that need it: {"query": ...} for a `ChatEnv` without
            a data set of its own. An episode has the row `seed % len(rows)`.
        options: arguments of the factory. One with a parameter `seed` that is not given has the episode's: a
            `DatasetChatEnv` shows the first question of its data set in the order that this seed gives.
    """
    return TorchRLEnv(name, rows, options)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the factory can be imported and takes the options."""
    check_function("the factory", name)
    given = dict(options)
    rows = given.pop("rows", None)
    if rows is not None:
        read_rows(rows)
    if "seed" in _parameters(load(name)):
        given.setdefault("seed", 0)
    try:
        inspect.signature(load(name)).bind(**given)
    except TypeError as problem:
        raise ConfigError(f"torchrl:{name} does not take the options: {problem}.") from problem
    except ValueError:  # it has no signature
        pass


class TorchRLEnv:
    """An episode of an `EnvBase`. The reward of a step is its "reward", 0 if the environment gives none."""

    def __init__(self, factory: str, rows: Rows | None, options: Mapping[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(f'torchrl:{factory} runs in worker processes: placement="processes".')
        self._factory, self._rows, self._options = factory, rows, dict(options)
        self._env: Any = None
        self._state: Any = None
        """The environment's TensorDict before the next action."""
        self._keys: tuple[Any, Any] = ("observation", "action")
        """Keys of the texts, if it is no chat."""
        self._known: list[Message] = []
        """The chat so far."""

    def reset(self, seed: int) -> Observation:
        """Make the environment, seed and reset it."""
        import torch
        from tensordict import TensorDict

        with _lists_are_stacks():
            self._env = self._make(seed)
            self._env.set_seed(seed)
            given = None
            if self._rows is not None:
                row = {name: [value] if self._size else value for name, value in row_of(self._rows, seed).items()}
                given = TensorDict(row, torch.Size(self._size))
            self._state = self._env.reset(given)
            return Observation(self._messages(self._state))

    def step(self, action: Action) -> Observation:
        """Give the answer to the environment."""
        with _lists_are_stacks():
            num_known = self._answer(action.text)
            after = self._env.step(self._state)["next"]
            reward = after.get("reward", None)
            terminated, truncated = (_flag(after.get(key, None)) for key in ("terminated", "truncated"))
            if not (terminated or truncated):
                terminated = _flag(after.get("done", None))
            observation = Observation(
                reward=0.0 if reward is None else reward.sum().item(), terminated=terminated, truncated=truncated
            )
            if not (terminated or truncated):
                observation.messages = self._messages(after, num_known)
                self._state = self._env.step_mdp(self._state)
            return observation

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None and not self._env.is_closed:
            self._env.close()

    @property
    def _size(self) -> tuple[int, ...]:
        return tuple(self._env.batch_size)

    def _make(self, seed: int) -> Any:
        from torchrl.envs import EnvBase

        factory = load(self._factory)
        options = dict(self._options)
        if "seed" in _parameters(factory):
            options.setdefault("seed", seed)
        env = factory(**options)
        if not isinstance(env, EnvBase):
            raise ValueError(refused(f"what {self._factory} returns", env, "a torchrl EnvBase"))
        if tuple(env.batch_size) not in ((), (1,)):
            raise ValueError(refused("batch_size", tuple(env.batch_size), "() or (1,): one episode at a time"))
        if not _is_chat(env):
            self._keys = _text_key(env.full_observation_spec, "observation"), _text_key(env.full_action_spec, "action")
        return env

    def _messages(self, state: Any, num_known: int = 0) -> str | list[Message]:
        """The environment's messages, without the `num_known` messages that a chat began with."""
        if not _is_chat(self._env):
            return _text(state.get(self._keys[0]))
        messages = self._chat(state["history"].prompt)
        if messages[:num_known] != self._known[:num_known]:
            raise ValueError(f"torchrl:{self._factory} rewrote the conversation: it must keep what was said.")
        self._known = messages
        return messages[num_known:]

    def _answer(self, text: str) -> int:
        """Put the answer into the state. Returns the length of a chat with it."""
        if not _is_chat(self._env):
            self._state[self._keys[1]] = [text] if self._size else text
            return 0
        from torchrl.data.llm import History

        history = self._state["history"]
        response = History(role="assistant", content=text, batch_size=()).unsqueeze(0)
        history.response = response.unsqueeze(0) if self._size else response
        history.full = history.prompt.extend(history.response, inplace=False, dim=-1)
        self._state["history"] = history
        self._known = [*self._known, {"role": "assistant", "content": text}]
        return len(self._known)

    def _chat(self, history: Any) -> list[Message]:
        one = history[0] if self._size else history
        pairs = zip(_list(one.role), _list(one.content), strict=True)
        return [{"role": role, "content": content} for role, content in pairs]


@contextmanager
def _lists_are_stacks() -> Iterator[None]:
    from tensordict import set_list_to_stack

    with set_list_to_stack(True):
        yield


def _is_chat(env: Any) -> bool:
    return ("history", "prompt", "content") in env.observation_keys


def _parameters(factory: Any) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:
        return set()


def _text_key(spec: Any, what: str) -> Any:
    from torchrl.data import NonTensor

    keys = [key for key in spec.keys(True, True) if isinstance(spec[key], NonTensor)]
    if len(keys) != 1 or keys[0][0] in ("text", "tokens"):
        found = ", ".join(map(str, spec.keys(True, True))) or "nothing"
        expected = 'a chat with input_mode="history", or one text'
        raise ValueError(f"torchrl: the {what} must be {expected}; this environment has {found}.")
    return keys[0]


def _text(value: Any) -> str:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        read = _list(value) if hasattr(value, "tolist") else value
        if read is value or read == value:
            raise ValueError(refused("the observation", value, "a text"))
        return _text(read)
    return value


def _list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _flag(value: Any) -> bool:
    return value is not None and bool(value.any())
