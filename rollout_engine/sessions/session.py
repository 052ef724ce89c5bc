"""One session of an agent: its conversations, answers, budgets and rewards. Any thread may call it."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.branches import reason_of
from rollout_engine.sessions.errors import SessionEndedError
from rollout_engine.sessions.forest import Forest, Found, Turn
from rollout_engine.sessions.known_responses import KnownResponses
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.messages import Key, Messages, keys_of
from rollout_engine.sessions.prompts import ChatPrompts, OwnIds
from rollout_engine.sessions.rows import SessionRow, make_rows
from rollout_engine.sessions.samples import BYTES_OF_ID, bytes_of
from rollout_engine.text.conversations import as_messages


class Place(msgspec.Struct, eq=False):
    """The place in the forest of a request that runs."""

    prompt_token_ids: list[int]
    own: OwnIds
    prompts: ChatPrompts
    messages: Messages
    keys: list[Key]
    sizes: list[int]
    parent: Turn | None
    origin: Turn | None
    began: str
    number: int = 0
    """The number of the request in its session."""
    max_tokens: int | None = None
    """Most tokens of each sample by the session's budget; None: no bound."""
    reserved: int = 0
    """Tokens of the budget that it may take."""
    params: SamplingParams | None = None
    adapter: str | None = None


class Session:
    """The conversations of one agent, as tokens.

    Args:
        limits: its bounds.
        sampling: sampling params of every request, over those that it asks for.
        now: seconds, by the clock of all later calls.
    """

    def __init__(
        self,
        session_id: str,
        api_key: str,
        *,
        limits: SessionLimits,
        now: float,
        group_id: int | str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.id, self.api_key, self.group_id, self.limits = session_id, api_key, group_id, limits
        self.sampling = dict(sampling or {})
        self.ends_at = now + limits.seconds
        """When it stops to take requests."""
        self.is_deleted = False
        self.num_begun = 0
        """Requests so far."""
        self.num_tokens = 0
        """Token ids of prompts and answers, shared prefixes once."""
        self.known_responses = KnownResponses()
        """Responses that later requests may name, on the event loop."""
        self.reward: float | None = None
        self._row_rewards: dict[int, float] = {}
        self._forest = Forest()
        self._open: set[Place] = set()
        self._num_sample_bytes = 0
        self._lock = threading.RLock()

    @property
    def num_turns(self) -> int:
        """Answers."""
        return len(self._forest.turns)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        return self._forest.num_bytes + self._num_sample_bytes

    def place(
        self,
        messages: Sequence[Any],
        prompts: ChatPrompts,
        *,
        now: float,
        params: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> Place:
        """Find the answer that a request continues, and make its prompt. Always end it by `cancel`.

        Raises `RequestError` for messages that cannot be rendered, and `SessionEndedError`.
        """
        listed = as_messages(messages)
        keys, sizes = keys_of(listed)
        with self._lock:
            self._require_open(now)
            found = self._find(prompts, listed, keys)
            reason, origin = reason_of(self._forest, prompts.key, listed, keys, found)
        parent, own = found.turn, None
        if parent is not None:
            own = prompts.after(parent, listed[found.depth :])
            if own is None:
                parent, reason = None, "template" if reason == "rollback" else reason
        own = prompts.new(listed) if own is None else own
        ids = own.token_ids if parent is None else parent.token_ids() + own.token_ids
        place = Place(ids, own, prompts, listed, keys, sizes, parent, origin, reason, params=params, adapter=adapter)
        with self._lock:
            if reason in ("rollback", "start") and any(_is_beside(place, each) for each in self._open):
                place.began = "parallel"
            self._reserve(place, found, params)
            self._open.add(place)
            place.number = self.num_begun
            self.num_begun += 1
        return place

    def record(self, place: Place, samples: Sequence[CompletionOutput], answers: Sequence[Mapping[str, Any]]) -> None:
        """Add samples of a request that runs, each with its message as the client gets it."""
        with self._lock:
            if self.is_deleted or place not in self._open:
                return
            for sample, answer in zip(samples, answers, strict=True):
                if sample.token_ids:  # else it was aborted before its first token
                    message = {"role": "assistant", "content": "", **_without_nulls(answer)}
                    self._add(place, sample, as_messages([message])[0])

    def cancel(self, place: Place) -> None:
        """End a request; its samples that were not recorded are forgotten."""
        with self._lock:
            self._open.discard(place)

    def rows(self) -> list[SessionRow]:
        """The training rows so far."""
        with self._lock:
            return make_rows(self.id, self._forest.turns, self.reward, self._row_rewards)

    def set_reward(self, reward: float, row: int | None = None) -> None:
        """Set the reward of all rows, or of one. Raises `RequestError`."""
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RequestError.for_field("reward", reward, "a finite number")
        with self._lock:
            if row is None:
                self.reward = float(reward)
                return
            num_rows = sum(turn.begins_row for turn in self._forest.turns)
            if not 0 <= row < num_rows:
                raise RequestError.for_field("row", row, f"the number of one of the {num_rows} rows")
            self._row_rewards[row] = float(reward)

    def ended_by(self, now: float) -> str | None:
        """Which bound is reached: "seconds", "tokens", "bytes" or "turns"; None: it takes requests."""
        limits = self.limits
        if now >= self.ends_at:
            return "seconds"
        if self.num_turns + len(self._open) >= limits.turns:
            return "turns"
        if self.num_bytes >= limits.num_bytes:
            return "bytes"
        return "tokens" if limits.tokens is not None and self.num_tokens >= limits.tokens else None

    def delete(self) -> None:
        """Forget everything."""
        with self._lock:
            self.is_deleted = True
            self._forest, self._num_sample_bytes, self.num_tokens = Forest(), 0, 0
            self.known_responses = KnownResponses()
            self._open.clear()
            self._row_rewards.clear()

    def _find(self, prompts: ChatPrompts, messages: Messages, keys: list[Key]) -> Found:
        """The request's conversation; missing thinking is overlooked if the template does not show it anyway."""
        found = self._forest.find(prompts.key, messages, keys)
        loose = self._forest.find(prompts.key, messages, keys, loose=True)
        if not loose.is_loose or loose.depth <= found.depth:
            return found
        whole = [*loose.path[-1].messages(), *messages[loose.path[-1].depth :]]
        return loose if prompts.text(whole) == prompts.text(messages) else found

    def _require_open(self, now: float) -> None:
        ended_by = "deleted" if self.is_deleted else self.ended_by(now)
        if ended_by is not None:
            self._refuse(ended_by)

    def _refuse(self, ended_by: str) -> None:
        limits = self.limits
        bounds = {
            "deleted": "it was deleted",
            "seconds": f"its {limits.seconds:g} seconds are over",
            "turns": f"it has its {limits.turns} answers",
            "bytes": f"its {limits.num_bytes} bytes are used up",
            "tokens": f"its {limits.tokens} tokens are used up",
        }
        raise SessionEndedError(f"The session takes no more requests: {bounds[ended_by]}. Make a new one.")

    def _reserve(self, place: Place, found: Found, params: SamplingParams | None) -> None:
        """Take a request's part of the budgets. Raises `SessionEndedError`."""
        if self.is_deleted:
            self._refuse("deleted")
        new_bytes = sum(place.sizes[max(0, len(found.path) - 1) :]) + BYTES_OF_ID * len(place.own.token_ids)
        if self.num_bytes + new_bytes > self.limits.num_bytes:
            self._refuse("bytes")
        if self.limits.tokens is None:
            return
        num_samples = 1 if params is None else params.n
        left = self.limits.tokens - self.num_tokens - sum(each.reserved for each in self._open)
        room = (left - len(place.own.token_ids)) // num_samples
        if room < 1:
            self._refuse("tokens")
        asked = room if params is None or params.max_tokens is None else params.max_tokens
        place.max_tokens = min(room, asked)
        place.reserved = len(place.own.token_ids) + place.max_tokens * num_samples

    def _add(self, place: Place, sample: CompletionOutput, answer: dict[str, Any]) -> None:
        forest, parent = self._forest, place.parent
        node = forest.grow(place.prompts.key, place.messages, place.keys, place.sizes)
        own_ids = place.own.token_ids
        first = next((turn for turn in node.asked if turn.own_ids is own_ids), None)
        began = place.began if first is None else "sample"
        turn = Turn(len(forest.turns), node, parent, first or place.origin, began, own_ids, sample)
        turn.new_messages, turn.shown, turn.is_shown_raw = place.own.new_messages, place.own.shown, place.own.is_raw
        turn.params, turn.adapter = place.params, place.adapter
        turn.said = place.prompts.read_answer(sample.token_ids)
        (key,), (size,) = keys_of([answer])
        turn.answered = forest.extend(node, answer, key, size)
        if parent is not None and parent.shown is not None:
            self._num_sample_bytes -= len(parent.shown)
            parent.shown = None  # only the ends of rows keep their text; others are rendered again after a rollback
        forest.add(turn)
        self._num_sample_bytes += bytes_of(sample) + BYTES_OF_ID * len(own_ids) + len(place.own.shown)
        self.num_tokens += len(sample.token_ids) + (len(own_ids) if first is None else 0)
        place.reserved = max(0, place.reserved - len(sample.token_ids) - (len(own_ids) if first is None else 0))


def _is_beside(place: Place, other: Place) -> bool:
    """Whether another request that runs continues the same turn, or asks after the same conversation."""
    if place.parent is not None or other.parent is not None:
        return place.parent is other.parent
    return place.prompts.key == other.prompts.key and place.keys == other.keys


def _without_nulls(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if value is not None}
