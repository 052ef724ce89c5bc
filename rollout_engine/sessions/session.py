"""One session of an agent: its conversations, answers, budgets and rewards. Any thread may call it."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.branches import reason_of
from rollout_engine.sessions.errors import SessionEndedError
from rollout_engine.sessions.forest import Forest, Found, Turn
from rollout_engine.sessions.known_responses import KnownResponses
from rollout_engine.sessions.limits import SessionLimits, refuse_deleted
from rollout_engine.sessions.memory import BYTES_OF_ID, BYTES_OF_REFERENCE, BYTES_OF_ROW_ID, BYTES_OF_TURN, Memory
from rollout_engine.sessions.messages import Key, Messages, keys_of
from rollout_engine.sessions.pictures import SessionPictures, pictures_in, place_after
from rollout_engine.sessions.place import Place
from rollout_engine.sessions.prompts import ChatPrompts
from rollout_engine.sessions.rows import SessionRow, make_rows
from rollout_engine.sessions.samples import bytes_of
from rollout_engine.sessions.versions import SessionVersion
from rollout_engine.text.conversations import as_messages

_RESPONSES_SHARE = 8
"""Responses that requests may name take an eighth of a session's memory at most."""


class Session:
    """The conversations of one agent, as tokens.

    Args:
        limits: its bounds.
        sampling: sampling params of every request, over those that it asks for.
        now: seconds, by the clock of all later calls.
        pin_version: whether all answers are to be of the policy version that is live when the first request arrives.
        total: memory of all sessions together; None: there are no others.
        on_refuse: called with the bound for which a request is refused, as `ended_by` names it, or "all bytes".
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
        pin_version: bool = False,
        total: Memory | None = None,
        on_refuse: Callable[[str], object] = str,
    ) -> None:
        self._on_refuse = on_refuse
        self.id, self.api_key, self.group_id, self.limits = session_id, api_key, group_id, limits
        self.sampling = dict(sampling or {})
        self._version = SessionVersion(self.sampling, pins=pin_version)
        self.ends_at = now + limits.seconds
        """When it stops to take requests."""
        self.is_deleted = False
        self.num_begun = 0
        """Requests so far."""
        self.num_tokens = 0
        """Token ids of prompts and answers, shared prefixes once."""
        self.memory = Memory(limits.num_bytes, total)
        """Approximate memory of all that the session keeps, answers for copies of its requests included."""
        self.known_responses = self._no_responses()
        """Responses that later requests may name, on the event loop."""
        self.reward: float | None = None
        self._row_rewards: dict[int, float] = {}
        self._forest = Forest()
        self._pictures = SessionPictures(self.memory)
        self._open: set[Place] = set()
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
        return self.memory.num_bytes

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

        Raises `RequestError` for messages that cannot be rendered, `SessionEndedError` beyond a bound of the session,
        and `RetryableError` if all sessions together have no memory left.
        """
        with self._lock:
            self._require_open(now)
            listed, read = self._pictures.read(as_messages(messages))
        keys, sizes = keys_of(listed)
        with self._lock:
            found = self._find(prompts, listed, keys)
            reason, origin = reason_of(self._forest, prompts.key, listed, keys, found)
        parent, own = found.turn, None
        if parent is not None:
            own = prompts.after(parent, listed[found.depth :], [each for some in read[found.depth :] for each in some])
            if own is None:
                parent, reason = None, "template" if reason == "rollback" else reason
        own = prompts.new(listed, [each for some in read for each in some]) if own is None else own
        ids, pictures = own.token_ids, own.pictures
        if parent is not None:
            ids = parent.token_ids()
            pictures = place_after(parent.prompt_pictures(), pictures, len(ids))
            ids += own.token_ids
        place = Place(ids, own, prompts, listed, keys, sizes, parent, origin, reason, pictures)
        place.params, place.adapter = params, adapter
        with self._lock:
            if reason in ("rollback", "start") and any(map(place.is_beside, self._open)):
                place.began = "parallel"
            self._reserve(place, found)
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
                self._version.note_answer(sample)
                if sample.token_ids:  # else it was aborted before its first token
                    message = {"role": "assistant", "content": "", **_without_nulls(answer)}
                    self._add(place, sample, as_messages([message])[0])

    def cancel(self, place: Place) -> None:
        """End a request; its samples that were not recorded are forgotten."""
        with self._lock:
            if place in self._open:
                self._open.discard(place)
                self.memory.add(-place.num_bytes)

    def version_params(self, live: int) -> dict[str, Any]:
        """Sampling params with which a request asks for the session's version; `live`: that of the weights now.

        Raises `SessionEndedError` if the session keeps a version that is past.
        """
        with self._lock:
            try:
                return self._version.params_at(live, has_begun=bool(self._forest.turns or self._open))
            except SessionEndedError as problem:
                self._refuse("policy_version", problem)

    def note_no_answer(self, live: int) -> None:
        """Note that a request ended without an answer; `live`: the version of the weights now."""
        with self._lock:
            self._version.note_no_answer(live)

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
        """Which bound is reached: "policy_version", "seconds", "tokens", "bytes" or "turns"; None: none is."""
        limits = self.limits
        if self._version.is_past:
            return "policy_version"
        if now >= self.ends_at:
            return "seconds"
        if self.num_turns + len(self._open) >= limits.turns:
            return "turns"
        if self.memory.is_full:
            return "bytes"
        return "tokens" if limits.tokens is not None and self.num_tokens >= limits.tokens else None

    def delete(self) -> None:
        """Forget everything."""
        with self._lock:
            self.is_deleted = True
            self._forest, self.num_tokens = Forest(), 0
            self.memory.close()
            self.known_responses = self._no_responses()
            self._pictures.clear()
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

    def _no_responses(self) -> KnownResponses:
        """Known responses that take a small part of the session's memory at most."""
        return KnownResponses(most_bytes=self.memory.share(_RESPONSES_SHARE), memory=self.memory)

    def _require_open(self, now: float) -> None:
        ended_by = "deleted" if self.is_deleted else self.ended_by(now)
        if ended_by == "deleted":
            raise refuse_deleted()
        if ended_by == "seconds":
            self._refuse(ended_by, self.limits.refuse_time())
        if ended_by == "turns":
            self._refuse(ended_by, self.limits.refuse_turns())
        if ended_by == "tokens":
            self._refuse(ended_by, self.limits.refuse_tokens(self.num_tokens))
        if (full := self.memory.full) is not None:
            self._refuse_memory(full)

    def _refuse(self, bound: str, problem: RequestError | RetryableError) -> NoReturn:
        self._on_refuse(bound)
        raise problem

    def _refuse_memory(self, full: Memory, num_new: int = 0) -> NoReturn:
        if full is self.memory:
            self._refuse("bytes", self.limits.refuse_bytes(full.num_bytes, num_new))
        self._refuse("all bytes", refuse_total(full))

    def _reserve(self, place: Place, found: Found) -> None:
        """Take a request's part of the budgets. Raises `SessionEndedError` and `RetryableError`."""
        if self.is_deleted:
            raise refuse_deleted()
        own, params = place.own, place.params
        if self.limits.tokens is not None:
            num_samples = 1 if params is None else params.n
            num_held = self.num_tokens + sum(each.reserved for each in self._open)
            room = (self.limits.tokens - num_held - len(own.token_ids)) // num_samples
            if room < 1:
                self._refuse("tokens", self.limits.refuse_tokens(num_held, len(own.token_ids)))
            asked = room if params is None or params.max_tokens is None else params.max_tokens
            place.max_tokens = min(room, asked)
            place.reserved = len(own.token_ids) + place.max_tokens * num_samples
        new_messages = sum(place.sizes[max(0, len(found.path) - 1) :])
        new_pictures = self._pictures.num_new_bytes(pictures_in(place.messages))
        new_ids = BYTES_OF_ID * len(own.token_ids) + BYTES_OF_REFERENCE * len(place.prompt_token_ids)
        num_bytes = new_messages + new_pictures + new_ids
        if (full := self.memory.take(num_bytes)) is not None:
            self._refuse_memory(full, num_bytes)
        place.num_bytes = num_bytes

    def _add(self, place: Place, sample: CompletionOutput, answer: dict[str, Any]) -> None:
        forest, parent = self._forest, place.parent
        num_bytes = -forest.num_bytes
        node = forest.grow(place.prompts.key, place.messages, place.keys, place.sizes)
        own_ids = place.own.token_ids
        first = next((turn for turn in node.asked if turn.own_ids is own_ids), None)
        began = place.began if first is None else "sample"
        turn = Turn(len(forest.turns), node, parent, first or place.origin, began, own_ids, sample)
        turn.new_messages, turn.own_pictures = place.own.new_messages, place.own.pictures
        turn.shown, turn.is_shown_raw = place.own.shown, place.own.is_raw
        turn.params, turn.adapter = place.params, place.adapter
        turn.said = place.prompts.read_answer(sample.token_ids)
        (key,), (size,) = keys_of([answer])
        turn.answered = forest.extend(node, answer, key, size)
        if parent is not None and parent.shown is not None:
            num_bytes -= len(parent.shown)
            parent.shown = None  # only the ends of rows keep their text; others are rendered again after a rollback
        forest.add(turn)
        self._pictures.keep(pictures_in(place.messages))
        num_new_ids = len(own_ids) if first is None else 0
        num_bytes += forest.num_bytes + BYTES_OF_TURN + BYTES_OF_ID * num_new_ids + bytes_of(sample)
        self.memory.add(num_bytes + len(place.own.shown) + len(turn.said) + _bytes_of_row(turn, place))
        self.num_tokens += len(sample.token_ids) + num_new_ids
        place.reserved = max(0, place.reserved - len(sample.token_ids) - num_new_ids)


def refuse_total(memory: Memory) -> RetryableError:
    """The error of a request for which all sessions together have no memory left."""
    what = f"All sessions together take {memory.num_bytes} bytes, of at most all_sessions_bytes={memory.most}"
    advice = "Read and delete sessions that have ended (DELETE /sessions/ID), or raise the bound"
    return RetryableError(f"{what}. {advice}; then try again.")


def _bytes_of_row(turn: Turn, place: Place) -> int:
    """Memory of a turn's part of its row once rows are made: every row has the ids of its whole prompt."""
    num_sampled = len(turn.sample.token_ids)
    if not turn.begins_row:
        return BYTES_OF_ROW_ID * (len(turn.own_ids) + num_sampled) + BYTES_OF_REFERENCE
    num_whole = len(place.prompt_token_ids) + turn.answered.depth
    return BYTES_OF_REFERENCE * num_whole + BYTES_OF_ROW_ID * num_sampled


def _without_nulls(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if value is not None}
