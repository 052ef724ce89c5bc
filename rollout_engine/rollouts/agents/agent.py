"""The description of an agent: which program or function plays an episode, its limits, and who rewards it."""

import inspect
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_engine.base.errors import RequestError, did_you_mean

PREFIX = "agent:"
"""env="agent:COMMAND" is `Agent("COMMAND")`."""
REWARD_ARGUMENTS = ("task", "output", "messages", "rows", "directory", "status")
"""Arguments that a reward function may name."""


class Agent:
    """An agent as the environment of a rollout: a program, or a function, that talks to the policy over HTTP.

        batch = policy.rollout(tasks, params, env=Agent("my_agent.py --fast", timeout=300), num_samples=8)

    Each episode is one run with a task of its own, a gateway session of its own, and for a program a fresh directory
    and these environment variables: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    ANTHROPIC_AUTH_TOKEN, ROLLOUT_TASK (JSON), ROLLOUT_TASK_FILE (a file with the same), ROLLOUT_SEED, HOME and TMPDIR.

    The reward is the value of `reward`; else that which a function returns, or the last line that a program prints,
    `{"reward": 1.0}`; else that which was set on the session. An agent without any of these fails, and so does a
    program whose exit status is not 0.
    """

    def __init__(
        self,
        program: str | Sequence[str] | Callable[..., Any],
        *,
        timeout: float = 600.0,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        reward: Callable[..., float] | None = None,
        max_output_bytes: int = 65_536,
    ) -> None:
        """Describe an agent. Raises `RequestError` for arguments that do not fit, and for a program that is not there.

        Args:
            program: a command, split as a shell splits it, but run without one; its words that name files of the
                current directory become absolute paths, and a first word that ends in ".py" is run by this Python. Or
                the words themselves, in a list, which stay as they are. Or a function `fn(session, task)`, which may
                be async, and is called on a thread.
            timeout: seconds of one run; then it is killed, and its episode has failed. (`episode_timeout` of the
                rollout is a limit instead: the episode is truncated, and counts.)
            cwd: directory that programs start in; None: a fresh one for each, which is removed afterwards.
            env: environment variables of the program in addition to those above, PATH, LANG, LC_ALL, LC_CTYPE, TZ and
                LD_LIBRARY_PATH; it inherits no others.
            reward: gives the reward of a run; called with those of these arguments that it names: `task`; `output`, a
                program's standard output; `messages`, the last conversation; `rows`, all `SessionRow`s; `directory`,
                the program's own; `status`, its exit status.
            max_output_bytes: bytes of standard output, and of standard error, that are kept, the last ones.
        """
        self.timeout, self.max_output_bytes = timeout, max_output_bytes
        self.directory = None if cwd is None else str(Path(cwd).absolute())
        self.variables, self.reward = dict(env or {}), reward
        self.function: Callable[..., Any] | None = None
        self.command: list[str] = []
        if callable(program):
            self.function, self.name = program, getattr(program, "__qualname__", type(program).__qualname__)
        else:
            self.command = _command(program)
            self.name = shlex.join(program if not isinstance(program, str) else shlex.split(program))
        self._check()

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"

    def _check(self) -> None:
        number = self.timeout
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
            raise RequestError.for_field("timeout", number, "a positive number of seconds")
        size = self.max_output_bytes
        if type(size) is not int or not 0 < size <= 1 << 30:
            raise RequestError.for_field("max_output_bytes", size, f"an int in [1, {1 << 30}]")
        if self.directory is not None and not os.path.isdir(self.directory):
            raise RequestError.for_field("cwd", self.directory, "a directory that exists")
        for name, value in self.variables.items():
            if (
                not isinstance(name, str)
                or not isinstance(value, str)
                or not name
                or "=" in name
                or "\0" in name + value
            ):
                raise RequestError.for_field(f"env[{name!r}]", value, "a text, whose name has no '='")
        if self.function is not None and (self.variables or self.directory is not None):
            raise RequestError("cwd= and env= are of programs; a function runs in this process.", field="env")
        if self.reward is not None:
            _check_reward(self.reward)
        if self.command and shutil.which(self.command[0], path=self.path) is None:
            bound = "a program that can be run: a path, or the name of one on PATH"
            raise RequestError.for_field("program", self.command[0], bound)

    @property
    def path(self) -> str:
        """The PATH of the program."""
        return self.variables.get("PATH", os.environ.get("PATH", os.defpath))


def as_agent(env: Any) -> Agent | None:
    """The agent that `env=` of a rollout describes; None: it is another environment. Raises `RequestError`."""
    if isinstance(env, str) and env.startswith(PREFIX):
        try:
            return Agent(env.removeprefix(PREFIX))
        except RequestError as problem:  # of the command, which is all that there is
            raise RequestError.for_field("env", env, problem.bound) from None
    return env if isinstance(env, Agent) else None


def _command(program: str | Sequence[str]) -> list[str]:
    """The words of the command, as the program is started with them."""
    if not isinstance(program, str):
        words = list(program) if isinstance(program, list | tuple) else []
        if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
            raise RequestError.for_field("program", program, "a command, its words in a list, or a function")
        return words
    try:
        words = shlex.split(program)
    except ValueError as problem:
        raise RequestError.for_field(
            "program", program, f"a command that can be split into words ({problem})"
        ) from None
    if not words or "\0" in program:
        raise RequestError.for_field("program", program, "a command, such as 'my_agent.py --fast'")
    first, *others = words
    if first.endswith(".py"):
        if not os.path.isfile(first):
            raise RequestError.for_field(
                "program", first, f"a script that exists; the current directory is {os.getcwd()}"
            )
        return [sys.executable, *map(_absolute, words)]
    return [_absolute(first) if os.sep in first else first, *map(_absolute, others)]


def _absolute(word: str) -> str:
    """The absolute path of a file of the current directory; any other word as it is."""
    return os.path.abspath(word) if os.path.isfile(word) else word


def _check_reward(reward: Callable[..., float]) -> None:
    """Raise `RequestError` unless it is a function of arguments that rewards get."""
    if not callable(reward):
        raise RequestError.for_field("reward", reward, f"a function of any of {', '.join(REWARD_ARGUMENTS)}")
    for parameter in reward_parameters(reward):
        is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if is_needed and (parameter.name not in REWARD_ARGUMENTS or parameter.kind is parameter.POSITIONAL_ONLY):
            what = f"The reward function needs '{parameter.name}', which it does not get"
            hint = did_you_mean(parameter.name, REWARD_ARGUMENTS)
            raise RequestError(f"{what}: name any of {', '.join(REWARD_ARGUMENTS)}. {hint}".rstrip(), field="reward")


def reward_parameters(reward: Callable[..., float]) -> list[inspect.Parameter]:
    """The parameters of a reward function; a builtin without a signature takes all by name."""
    try:
        return list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]
