"""The calls of one answer: who makes which, and their results in the order of the calls."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from envs_adapters.base import Message
from rollout_engine.base.errors import unknown_name
from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.formats.tool_calls import ToolCalls

Maker: TypeAlias = Literal["rollout", "functions", "step"]
"""Makers of calls, in order: the rollout, for its own tools; the environment's functions; its `step`, for tools that it
gave as JSON schemas."""


class CallResults:
    """Collects one message for each call of an answer, also for those that cannot be made.

    Call `next_calls` and `add` in turn until `next_calls` returns None.

    Args:
        parsed: the calls, and the parts that were meant as calls.
        makers: name of a tool -> the maker of its calls.
    """

    def __init__(self, parsed: ToolCalls, makers: Mapping[str, Maker]) -> None:
        self._messages: list[Message | None] = []
        self._waiting: dict[Maker, list[tuple[int, ToolCall]]] = {maker: [] for maker in get_args(Maker)}
        self.maker: Maker | None = None
        """Maker of the calls that `next_calls` returned last."""
        self._places: list[int] = []
        """Places of the results of these calls."""
        for place, each in enumerate(parsed.found):
            if not isinstance(each, ToolCall):
                self._messages.append(_error(each.problem))
            elif each.name not in makers:
                self._messages.append(_error(unknown_name("tool", each.name, makers), each.name))
            else:
                self._messages.append(None)
                self._waiting[makers[each.name]].append((place, each))

    @property
    def messages(self) -> list[Message]:
        """The results so far, in the order of the calls."""
        return [message for message in self._messages if message is not None]

    def next_calls(self) -> list[ToolCall] | None:
        """All calls of the next maker; None once all calls have been made."""
        for maker, calls in self._waiting.items():
            if calls:
                self.maker, self._waiting[maker] = maker, []
                self._places = [place for place, _ in calls]
                return [call for _, call in calls]
        self.maker, self._places = None, []
        return None

    def miscount(self, messages: Sequence[Message]) -> str:
        """Why the messages answer some of the last calls, and not each of them once; "" if they do, or answer none."""
        num_results = sum(message["role"] == "tool" for message in messages)
        if not num_results or not self._places or num_results == len(self._places):
            return ""
        given = f"step answered {num_results} times, and the policy had made {len(self._places)} calls"
        return f'{given}: return one message of the role "tool" for each call, in their order.'

    def add(self, messages: Sequence[Message]) -> list[Message]:
        """Take the results of the last calls: as many messages of the role "tool", in order. Returns the others."""
        others: list[Message] = []
        for message in messages:
            if self._places and message["role"] == "tool":
                self._messages[self._places.pop(0)] = message
            else:
                others.append(message)
        return others


def _error(problem: str, name: str | None = None) -> Message:
    message = {"role": "tool", "content": f"Error: {problem}"}
    return message if name is None else message | {"name": name}
