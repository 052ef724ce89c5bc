"""One seat of an episode: its observations and answers, as messages and as rows of token ids.

    row = prompt | sampled | glue | sampled | glue | sampled

Sampled text is never tokenized again. If the chat template rewrites earlier turns, a new row begins with the
conversation as the template now writes it (`branches`), or the episode is refused.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from envs_adapters.base import Message
from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.pictures import PlacedPicture, shift_pictures
from rollout_engine.text.chat_turns import RewrittenTurns, once_followed
from rollout_engine.text.formats.tool_calls import PROMPT_END
from rollout_engine.text.picture_processor import ReadPicture


class Turns(Protocol):
    """The prompts of conversations: `ChatTurns` or `TextTurns`."""

    @property
    def needs_messages(self) -> bool: ...
    def text(self, messages: list[Message]) -> str: ...
    def begin(self, messages: list[Message], text: str) -> list[int]: ...
    def message(self, text: str) -> Message: ...
    def between(
        self, shown: str, now: str, said: str, sampled: Sequence[int], *, has_ended: bool = True
    ) -> list[int]: ...
    def rewriting(self, roles: Sequence[str]) -> str | None: ...
    def read_pictures(self, messages: list[Message]) -> tuple[list[Message], list[ReadPicture]]: ...
    def place_pictures(
        self, token_ids: list[int], pictures: Sequence[ReadPicture]
    ) -> tuple[list[int], list[PlacedPicture]]: ...
    def check_pictures(self, pictures: Sequence[PlacedPicture], token_ids: Sequence[int]) -> None: ...


WriteAnswer: TypeAlias = Callable[[CompletionOutput, list[int], int], Message | None]
"""(answer, end of its prompt, number of calls so far) -> its message; None: its text is its content."""


class Row(msgspec.Struct):
    """A training row: a prompt and all that follows it."""

    prompt: list[int]
    response: list[int] = []
    """Sampled tokens and glue."""
    turns: list[int] = []
    """Per token of the response the turn that sampled it, -1 for glue."""
    samples: list[tuple[int, CompletionOutput]] = []
    """The answers, and the index in the response at which each begins."""
    pictures: list[PlacedPicture] = []
    """At positions in prompt and response together."""

    def add_glue(self, token_ids: list[int], pictures: Sequence[PlacedPicture] = ()) -> None:
        """Append text that the policy did not sample, with pictures at positions in it."""
        self.pictures += shift_pictures(pictures, len(self.prompt) + len(self.response))
        self.response += token_ids
        self.turns += [-1] * len(token_ids)

    def add_sample(self, turn: int, sample: CompletionOutput) -> None:
        """Append an answer."""
        self.samples.append((len(self.response), sample))
        self.response += sample.token_ids
        self.turns += [turn] * len(sample.token_ids)

    def drop_last_glue(self) -> None:
        """Remove the tokens that were appended for an answer that was not sampled."""
        end = self.samples[-1][0] + len(self.samples[-1][1].token_ids) if self.samples else 0
        del self.response[end:], self.turns[end:]
        self.pictures = [each for each in self.pictures if each.end <= len(self.prompt) + end]


class Conversation:
    """The messages and answers of one seat. A policy plays it if `turns` is given, else a function of the user's."""

    def __init__(self, turns: Turns | None, *, branches: bool = False, write: WriteAnswer | None = None) -> None:
        """`write`: makes the message of an answer; None: its text is its content."""
        self.messages: list[Message] = []
        self.rows: list[Row] = []
        self.rewards: list[float] = []
        """One per turn."""
        self._turns, self._branches, self._write = turns, branches, write
        self._num_calls = 0
        self._call_ids: list[str] = []
        """Ids of the last answer's calls whose results have not been read."""
        self._unread: list[Message] = []
        self._pictures: list[ReadPicture] = []
        """Pictures of the messages, in order; the last `_num_unread` stand in messages that are not read yet."""
        self._num_unread = 0
        self._shown = ""
        """The text of the last prompt."""
        self._early_reward = 0.0
        """The reward given before the first turn."""

    @property
    def num_turns(self) -> int:
        return len(self.rewards)

    def read(self, messages: list[Message]) -> None:
        """Add the messages before the next answer, pictures as the policy gets them. Raises `RequestError`."""
        messages = [self._with_call_id(message) for message in messages]
        if self._turns is not None:
            messages, pictures = self._turns.read_pictures(messages)
            self._pictures += pictures
            self._num_unread += len(pictures)
        self._unread += messages
        self.messages += messages

    @property
    def num_pictures(self) -> int:
        """Pictures of all messages, those that are not in a prompt yet included."""
        return len(self._pictures)

    @property
    def pictures(self) -> list[PlacedPicture]:
        """Pictures of the last prompt."""
        return list(self.rows[-1].pictures)

    def prompt(self) -> list[int]:
        """Token ids of the next turn's prompt. Raises `RequestError` if the conversation cannot be continued."""
        assert self._turns is not None, "a policy plays this seat"
        unread, self._unread = self._unread, []
        seen, self._num_unread = len(self._pictures) - self._num_unread, 0
        if not unread and (self._turns.needs_messages or not self.rows):
            gave = "step returned no message" if self.rows else "reset returned no text"
            raise RequestError(f"The environment gave nothing to answer: {gave}.", field="messages")
        shown, self._shown = self._shown, self._turns.text(self.messages)
        if self.rows:
            row = self.rows[-1]
            sample = row.samples[-1][1]
            try:
                has_ended = sample.finish_reason == "stop"
                glue = self._turns.between(shown, self._shown, sample.text, sample.token_ids, has_ended=has_ended)
                row.add_glue(*self._turns.place_pictures(glue, self._pictures[seen:]))
                prompt = row.prompt + row.response
                self._turns.check_pictures(row.pictures, prompt)
                return prompt
            except RewrittenTurns as problem:
                if not self._branches:
                    raise rewritten(once_followed([each["role"] for each in unread], problem.how)) from problem
        prompt, pictures = self._turns.place_pictures(self._turns.begin(self.messages, self._shown), self._pictures)
        self._turns.check_pictures(pictures, prompt)
        self.rows.append(Row(prompt, pictures=pictures))
        return prompt

    def answer(self, sample: CompletionOutput) -> None:
        """Add the policy's answer."""
        row, written = self.rows[-1], None
        if self._write is not None:
            written = self._write(sample, (row.prompt[-PROMPT_END:] + row.response)[-PROMPT_END:], self._num_calls)
        row.add_sample(self.num_turns, sample)
        self.say(sample.text, written)

    def say(self, text: str, written: Message | None = None) -> None:
        """Add the text of an answer, or its message, and the reward given before any."""
        message: Message = {"role": "assistant", "content": text}
        if written is not None:
            message = written
        elif self._turns is not None:
            message = self._turns.message(text)
        self._call_ids = [call["id"] for call in message.get("tool_calls", ())]
        self._num_calls += len(self._call_ids)
        self.messages.append(message)
        self.rewards.append(self._early_reward)
        self._early_reward = 0.0

    def _with_call_id(self, message: Message) -> Message:
        """A result with the id of its call, for templates that read it."""
        if message["role"] != "tool" or "tool_call_id" in message or not self._call_ids:
            return message
        return message | {"tool_call_id": self._call_ids.pop(0)}

    def reward(self, reward: float) -> None:
        """Add a reward to the last turn."""
        if self.rewards:
            self.rewards[-1] += reward
        else:
            self._early_reward += reward

    @property
    def total_reward(self) -> float:
        """The return: the sum of all rewards."""
        return sum(self.rewards) + self._early_reward

    def end(self) -> None:
        """Remove the glue, or the branch, of an answer that will not be sampled."""
        if len(self.rows) > 1 and not self.rows[-1].samples:
            del self.rows[-1]
        for row in self.rows:
            row.drop_last_glue()


def rewritten(how: str) -> RequestError:
    """Make the error of a chat template that rewrites earlier turns."""
    advice = (
        "on_rewrite='branch' trains such turns as rows of their own; or give a chat_template= (or "
        "chat_template_kwargs=) that keeps earlier turns as they were sampled"
    )
    what = f"Turns cannot be continued token by token: the chat template rewrites what came before ({how})"
    return RequestError(f"{what}. {advice}.", field="chat_template")
