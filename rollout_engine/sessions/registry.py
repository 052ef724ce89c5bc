"""All sessions of one server. Any thread may call it."""

import heapq
import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_engine.base.errors import RequestError, RetryableError
from rollout_engine.sessions.errors import SessionNotFoundError
from rollout_engine.sessions.limits import SessionLimits
from rollout_engine.sessions.memory import Memory
from rollout_engine.sessions.session import Session, refuse_total

_ID_BYTES, _KEY_BYTES = 16, 32
_GROUP_IDS = 1 << 62
"""Bound of the ints; numbers for names follow the greatest."""
_NO_KEY = secrets.token_urlsafe(_KEY_BYTES)


class Sessions:
    """Sessions by their ids, which cannot be guessed."""

    def __init__(self, max_sessions: int, limits: SessionLimits, most_bytes: int = 1 << 62) -> None:
        """`limits`: of each session; it may be given fewer seconds and tokens. `most_bytes`: of all together."""
        self._max_sessions, self._limits = max_sessions, limits
        self.memory = Memory(most_bytes)
        """Approximate memory of all sessions."""
        self._sessions: dict[str, Session] = {}
        self._late: list[tuple[float, str]] = []
        """A heap of (when a session is deleted at the latest, its id)."""
        self._lock = threading.Lock()
        self.num_refused: Counter[str] = Counter()
        """Requests of agents that were refused, by the bound: as `Session.ended_by`, or "all bytes"."""

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self,
        *,
        now: float,
        group_id: int | str | None = None,
        sampling: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        tokens: int | None = None,
        pin_version: bool = False,
    ) -> Session:
        """Make a session.

        Raises `RequestError` for bounds above the server's, `RetryableError` at `max_sessions` and `most_bytes`.
        """
        if self.memory.is_full:
            self.note_refusal("all bytes")
            raise refuse_total(self.memory)
        limits = self._limits
        if isinstance(group_id, int) and not -_GROUP_IDS <= group_id < _GROUP_IDS:
            raise RequestError.for_field(
                "group_id", group_id, "a name, or an int below 2**62 in size: batches hold int64"
            )
        if seconds is not None and not 0 < seconds <= limits.seconds:
            raise RequestError.for_field("seconds", seconds, f"above 0 and at most {limits.seconds:g}")
        most = limits.tokens
        if tokens is not None and (tokens < 1 or (most is not None and tokens > most)):
            raise RequestError.for_field("tokens", tokens, "at least 1" + (f" and at most {most}" if most else ""))
        limits = SessionLimits(seconds or limits.seconds, tokens or most, limits.num_bytes, limits.turns)
        made = Session(
            secrets.token_urlsafe(_ID_BYTES),
            secrets.token_urlsafe(_KEY_BYTES),
            limits=limits,
            now=now,
            group_id=group_id,
            sampling=sampling,
            pin_version=pin_version,
            total=self.memory,
            on_refuse=self.note_refusal,
        )
        with self._lock:
            if len(self._sessions) >= self._max_sessions:
                what = f"There are max_sessions={self._max_sessions} sessions"
                raise RetryableError(f"{what}: delete those that are read (DELETE /sessions/ID), then try again.")
            self._sessions[made.id] = made
            heapq.heappush(self._late, (made.ends_at + limits.seconds, made.id))
        return made

    def note_refusal(self, bound: str) -> None:
        """Count a request that was refused for a bound."""
        with self._lock:
            self.num_refused[bound] += 1

    def find(self, session_id: str) -> Session:
        """The session of an id. Raises `SessionNotFoundError`."""
        found = self._sessions.get(session_id)
        if found is None:
            raise SessionNotFoundError
        return found

    def open(self, session_id: str, key: str) -> Session:
        """The session of an id and its key. Raises `SessionNotFoundError`, alike for a wrong id and a wrong key."""
        found = self._sessions.get(session_id)
        expected = _NO_KEY if found is None else found.api_key
        is_right = hmac.compare_digest(key.encode("utf-8", "replace"), expected.encode())
        if found is None or not is_right:
            raise SessionNotFoundError
        return found

    def delete(self, session_id: str) -> None:
        """Forget a session and all that it holds. Raises `SessionNotFoundError`."""
        with self._lock:
            found = self._sessions.pop(session_id, None)
            if len(self._late) > 2 * len(self._sessions) + 16:
                self._late = [each for each in self._late if each[1] in self._sessions]
                heapq.heapify(self._late)
        if found is None:
            raise SessionNotFoundError
        found.delete()

    def end_late(self, now: float) -> list[str]:
        """Delete the sessions that ended long ago, and return their ids."""
        late: list[Session] = []
        with self._lock:
            while self._late and self._late[0][0] <= now:
                _, session_id = heapq.heappop(self._late)
                if (found := self._sessions.pop(session_id, None)) is not None:  # else it is deleted already
                    late.append(found)
        for found in late:
            found.delete()
        return [found.id for found in late]
