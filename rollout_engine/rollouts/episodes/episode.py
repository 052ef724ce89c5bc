"""The state machine of one episode: each event returns its next task. No thread, clock or engine here."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from envs_adapters.base import Action, Message, Observation
from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.seeds import mix
from rollout_engine.base.tool_call import ToolCall
from rollout_engine.batches.reward_functions import is_reward
from rollout_engine.rollouts.episodes.call_results import CallResults, Maker
from rollout_engine.rollouts.episodes.conversation import Conversation
from rollout_engine.rollouts.episodes.tool_functions import tool_name
from rollout_engine.text.formats.tool_calls import PROMPT_END, ToolCalls

EndedBy: TypeAlias = Literal[
    "terminated",
    "truncated",
    "max_turns",
    "max_episode_tokens",
    "max_prompt_pictures",
    "episode_timeout",
    "policy_version",
    "error",
]
"""The cause of an episode's end: its environment, by a final state ("terminated") or its own limit ("truncated"), or
a limit of the rollout, a weight update ("policy_version", with `pin_version=True`), or a fault."""

_SEATS, _TURNS = 1 << 33, 1 << 32
"""Offsets beyond the indexes of samples, so that no two draws of an episode share a seed."""


class Ask(msgspec.Struct, frozen=True):
    """A policy is to answer."""

    seat: int
    token_ids: list[int]
    seed: int
    room: int
    """Tokens that the answer may have."""
    pictures: list[PlacedPicture] = []
    """Pictures of the prompt."""


class Consult(msgspec.Struct, frozen=True):
    """A function of the user's is to answer, for a seat that it plays."""

    seat: int
    messages: list[Message]


class Act(msgspec.Struct, frozen=True):
    """The environment is to take a step."""

    action: Action


class UseTools(msgspec.Struct, frozen=True):
    """Tools of the rollout are to be called."""

    calls: list[ToolCall]


FirstPrompt: TypeAlias = tuple[list[int], list[tuple[int, bytes]]]
"""Token ids, and start and digest of each picture."""
Next: TypeAlias = Ask | Consult | Act | UseTools | None
"""The next task of an episode; None: it has ended."""


class Rules(msgspec.Struct, frozen=True):
    """The same for all episodes of a rollout."""

    max_turns: int
    max_tokens: Callable[[int], int | None]
    """Most tokens of a seat's rows, prompt included; None for a seat that a function plays."""
    new_conversation: Callable[[int, list[dict[str, Any]]], Conversation]
    """Makes a seat's conversation; the environment's tools are given."""
    find_calls: Callable[[int, CompletionOutput, list[dict[str, Any]], list[int]], ToolCalls]
    """Finds the tool calls in a seat's answer, given the environment's tools and the ids that end the prompt."""
    max_pictures: Callable[[int], int] = lambda seat: sys.maxsize
    """Most pictures of a seat's prompt."""
    min_room: int = 1
    """Tokens that every answer must have room for."""
    own_tools: frozenset[str] = frozenset()
    """Names of the tools that the rollout calls itself."""


class Episode:
    """One episode. Each method takes an event and returns the next task.

    Args:
        key: its number in the rollout.
        group, member: which start, and which of the samples of that start.
        seed: of its first answer; those of other turns and seats follow from it.
    """

    def __init__(self, rules: Rules, key: int, group: int, member: int, seed: int) -> None:
        self.key, self.group, self.member, self.seed = key, group, member, seed
        self.seats: dict[int, Conversation] = {}
        self.ended_by: EndedBy | None = None
        self.is_truncated = False
        """Whether its environment, a limit or a fault cut it off. Environments may also set it on a terminated one."""
        self.error: str | None = None
        self.info: Mapping[str, Any] = {}
        """The `info` of the last observation."""
        self.first_prompt: FirstPrompt | None = None
        """Token ids and pictures of the first prompt of all; None before it."""
        self._rules, self._tools = rules, list[dict[str, Any]]()
        """Schemas of the environment's tools."""
        self._makers: dict[str, Maker] = dict.fromkeys(rules.own_tools, "rollout")
        """Name of a tool -> the maker of its calls."""
        self._action, self._results = Action(""), CallResults(ToolCalls(), {})
        """The last answer, without its calls; and their results, until its seat has read them."""
        self._prompt_end: list[int] = []
        """The last token ids of the last prompt."""
        self.seat = 0
        """The seat that acts now, or acted last."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def samples(self) -> list[CompletionOutput]:
        """All answers of policies, seat by seat."""
        rows = (row for conversation in self.seats.values() for row in conversation.rows)
        return [sample for row in rows for _, sample in row.samples]

    @property
    def counted_reward(self) -> float | None:
        """The return of the first seat; None if the episode failed, or has no seat."""
        return self.seats[0].total_reward if self.seats and self.error is None else None

    def turn_seed(self, seat: int, turn: int) -> int:
        """Sequence seed of a turn: `SamplingParams(seed=..., n=1)` replays it."""
        return seed_of_turn(mix(self.seed, _SEATS + seat) if seat else self.seed, turn)

    def began(self, observation: Observation, tools: list[dict[str, Any]], functions: list[str], seats: int) -> Next:
        """The environment has been reset. `functions`: names of the tools whose calls its `step` does not answer."""
        self._tools = tools
        for name in map(tool_name, tools):
            if name in self._makers:
                return self.fail(f"The rollout and the environment both have a tool '{name}': rename one of them.")
            self._makers[name] = "functions" if name in functions else "step"
        try:
            self.seats = {seat: self._rules.new_conversation(seat, tools) for seat in range(seats)}
        except RequestError as error:
            return self.fail(str(error))
        return self.take_observation(observation)

    def take_sample(self, sample: CompletionOutput) -> Next:
        """A policy has answered."""
        if sample.finish_reason == "error":
            return self.fail(f"The engine failed: {sample.error}")
        self.seats[self.seat].answer(sample)
        parsed = self._rules.find_calls(self.seat, sample, self._tools, self._prompt_end)
        is_cut = sample.finish_reason == "length"
        self._action = Action(sample.text, list(sample.token_ids), seat=self.seat, is_cut=is_cut)
        if not parsed.calls:
            return Act(msgspec.structs.replace(self._action, broken_calls=parsed.broken))
        self._results = CallResults(parsed, self._makers)
        return self._make_calls()

    def take_results(self, messages: list[Message]) -> Next:
        """Functions of the rollout or of the environment have been called."""
        self._results.add(messages)
        return self._make_calls()

    def take_text(self, text: str) -> Next:
        """A function has answered."""
        self.seats[self.seat].say(text)
        return Act(Action(text, seat=self.seat))

    def take_observation(self, observation: Observation) -> Next:
        """The environment has taken a step, or called its functions."""
        messages = observation.messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}] if messages else []
        if self._results.maker == "functions":
            return self.take_results([*messages])
        self.info, self.is_truncated = observation.info, observation.truncated
        rewards = observation.reward
        for seat, reward in (rewards if isinstance(rewards, Mapping) else {self.seat: rewards}).items():
            if seat not in self.seats:
                return self.fail(f"The environment rewards seat {seat}, but has {len(self.seats)} seats.")
            if not is_reward(total := self.seats[seat].total_reward + reward):
                return self.fail(f"The rewards of seat {seat} add up to {total:g}, which is not finite in float32.")
            self.seats[seat].reward(reward)
        if observation.seat not in self.seats:
            return self.fail(f"Seat {observation.seat} is to act, but the environment has {len(self.seats)} seats.")
        if problem := self._results.miscount(messages):
            return self.fail(problem)
        others = self._results.add(messages) if observation.seat == self.seat else [*messages]
        try:
            self._read_results()
            self.seat = observation.seat
            self.seats[self.seat].read(others)
        except RequestError as error:  # a picture that cannot be read
            return self.fail(str(error))
        if observation.terminated or observation.truncated:
            return self.end("terminated" if observation.terminated else "truncated")
        return self._next_turn()

    def _make_calls(self) -> Next:
        """Have the next calls of an answer made; once all have been, its seat takes its next turn."""
        calls = self._results.next_calls()
        if calls is None:
            self._read_results()
            return self._next_turn()
        if self._results.maker == "rollout":
            return UseTools(calls)
        return Act(msgspec.structs.replace(self._action, tool_calls=calls))

    def _read_results(self) -> None:
        """Let the seat that made calls read their results."""
        self.seats[self.seat].read(self._results.messages)
        self._results = CallResults(ToolCalls(), {})

    def _next_turn(self) -> Next:
        conversation = self.seats[self.seat]
        if conversation.num_turns >= self._rules.max_turns:
            return self.end("max_turns")
        limit = self._rules.max_tokens(self.seat)
        if limit is None:
            return Consult(self.seat, list(conversation.messages))
        if conversation.num_turns and conversation.num_pictures > self._rules.max_pictures(self.seat):
            return self.end("max_prompt_pictures")
        try:
            token_ids = conversation.prompt()
        except RequestError as error:
            return self.fail(str(error))
        if self.first_prompt is None:
            self.first_prompt = token_ids, [(each.start, each.picture.digest) for each in conversation.pictures]
        room = limit - len(token_ids)
        if room < self._rules.min_room and not conversation.num_turns:
            conversation.rows.clear()
            return self.fail(f"The first prompt has {len(token_ids)} tokens, which leaves no room of {limit}.")
        if room < self._rules.min_room:
            return self.end("max_episode_tokens")
        self._prompt_end = token_ids[-PROMPT_END:]
        seed = self.turn_seed(self.seat, conversation.num_turns)
        return Ask(self.seat, token_ids, seed, room, conversation.pictures)

    def fail(self, reason: str) -> Next:
        """End it for a fault."""
        self.error = reason
        return self.end("error")

    def end(self, ended_by: EndedBy) -> Next:
        """End it: nothing is needed any more."""
        self.ended_by = ended_by
        self.is_truncated |= ended_by != "terminated"
        for conversation in self.seats.values():
            conversation.end()
        return None


def seed_of_turn(seed: int, turn: int) -> int:
    """Sequence seed of a seat's turn; `seed` is that of its first one."""
    return mix(seed, _TURNS + turn) if turn else seed
