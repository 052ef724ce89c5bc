"""Where the requests of each session go: to one replica, as long as it serves, but those that it refuses."""

from collections.abc import Iterable

from rollout_engine.fleet.plan.brain import Brain


class SessionHomes:
    """The replica of each session, as its requests are seen to be sent."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._sessions: dict[int, str] = {}
        """Sequence id -> session."""
        self._homes: dict[str, int] = {}

    def opened(self, sequence_ids: Iterable[int], session_id: str | None) -> None:
        """Note a new request."""
        if session_id is not None:
            self._sessions |= dict.fromkeys(sequence_ids, session_id)

    def sent(self, replica: int, sequence_id: int) -> None:
        """Note that a request is sent; AssertionError where the home of its session is another one, and serves."""
        session, entry = self._sessions.get(sequence_id), self._brain.ledger.get(sequence_id)
        if session is not None:
            home = self._homes.get(session)
            if entry is not None and home in entry.refused_by:
                return
            is_moved = home is not None and home != replica and home in self._brain.serving
            assert not is_moved, f"session {session} goes to replica {replica}, and replica {home} serves"
            self._homes[session] = replica
