"""An environment, as its author writes it. Anything with these methods is one; nothing needs to be subclassed.

    class GuessNumber:
        def reset(self, seed):
            self.number, self.left = random.Random(seed).randint(1, 7), 3
            return "I think of a number from 1 to 7. Guess it."

        def step(self, action):
            guess, self.left = action.text.strip(), self.left - 1
            if guess == str(self.number):
                return Observation("Right.", reward=1.0, terminated=True)
            words = "Higher." if guess < str(self.number) else "Lower."
            return Observation(words, truncated=self.left == 0)

    batch = policy.rollout(None, params, env=GuessNumber, num_episodes=64, num_samples=8)

One object plays one episode: a rollout calls `GuessNumber()` for each.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from rollout_engine.base.tool_call import BrokenCall, ToolCall

Message: TypeAlias = dict[str, Any]
"""{"role": "user", "content": "..."}, as chat templates take it."""
Messages: TypeAlias = str | Sequence[Message]
"""Text is one user message; if the tokenizer has no chat template, it is appended as it is."""
Placement: TypeAlias = Literal["threads", "processes"]


class Action(msgspec.Struct, frozen=True):
    """One answer of a policy."""

    text: str
    """Without special tokens."""
    token_ids: list[int] = []
    """Ids as sampled, end token included."""
    tool_calls: list[ToolCall] = []
    """Calls in the text of tools that the environment gave as JSON schemas."""
    broken_calls: list[BrokenCall] = []
    """Parts meant as calls, of an answer without any call that could be read."""
    seat: int = 0
    """Which player answers."""
    is_cut: bool = False
    """Whether the answer was cut off by `max_tokens` or the length of the context."""

    def __getattr__(self, name: str) -> Any:
        hint = ": an action is no str, its text is `action.text`" if hasattr(str, name) else ""
        raise AttributeError(f"'Action' object has no attribute '{name}'{hint}")


class Observation(msgspec.Struct):
    """An environment's answer to an action, or its first message."""

    messages: Messages = ()
    """Messages that `seat` reads next. A chat needs some text; without a chat template "" lets the seat continue."""
    reward: float | Mapping[int, float] = 0.0
    """Reward of this step, for the seat that acted; {seat: reward} for several. A seat's return is their sum."""
    terminated: bool = False
    """The episode has ended in the environment: nothing would follow."""
    truncated: bool = False
    """The episode was cut off, by a limit of steps for example: there would have been more."""
    info: Mapping[str, Any] = {}
    """Anything else; ("info") of the rollout holds that of the last step."""
    seat: int = 0
    """Which player acts next."""


class Env(Protocol):
    """An environment of one episode. Either method may be `async def`.

    Optional: `close()`, called once at the end; `tools`, functions or JSON schemas that the policy may call (functions
    are called by the rollout, calls of schemas go to `step`); `num_seats`, 1 unless given, the number of players.
    """

    def reset(self, seed: int) -> "Messages | Observation | Awaitable[Messages | Observation]":
        """Start the episode that `seed`, in [0, 2**31), determines. The samples of a group have one seed."""
        ...

    def step(self, action: Action) -> "Observation | Awaitable[Observation]":
        """Answer an action. Gymnasium's tuple (messages, reward, terminated, truncated, info) will do as well."""
        ...


class EnvSpec(msgspec.Struct, frozen=True):
    """How environments are made, and their placement: `spec()` makes one. `make_env` returns it."""

    factory: Callable[..., Any] | str
    """Returns an environment; or its "module:attribute". Worker processes import it."""
    arguments: Mapping[str, Any] = {}
    """Keyword arguments for it; plain data if `placement` is "processes"."""
    name: str = ""
    """For messages."""
    placement: Placement = "threads"
    """"threads" of this process, for environments that compute little or wait; or "processes" of their own, for those
    that are slow, draw from the global random generators, or may hang: a stuck process is ended and replaced. Processes
    wait a minute for the policy's next rollout, so that it need not import the environment again."""
    num_workers: int | None = None
    """Threads or processes at most; None: 64 threads, or as many processes as there are processors."""
    step_timeout: float = 60.0
    """Seconds for each `reset` and `step`; then the episode ends with an error."""
    is_single_turn: bool = False
    """Whether every episode ends with its first answer, so that the chat template need not continue conversations."""

    def __call__(self) -> Any:
        """Make one environment, here."""
        return load(self.factory)(**self.arguments)


def load(factory: Callable[..., Any] | str) -> Callable[..., Any]:
    """The function that "module:attribute" names; a function is returned as it is.

    Raises `ValueError` for a name of another form, and the errors of the import.
    """
    if not isinstance(factory, str):
        return factory
    module, _, attribute = factory.partition(":")
    if not attribute:
        raise ValueError(f"'{factory}' names no attribute of a module")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
