"""Bounds of one session, and how a request beyond one of them is refused."""

import msgspec

from rollout_engine.sessions.errors import SessionEndedError


class SessionLimits(msgspec.Struct, frozen=True):
    """A request that would exceed one of these is refused with `SessionEndedError`."""

    seconds: float = 3600.0
    """Time in which requests are taken. The rows can be read for as long again, then the session is deleted."""
    tokens: int | None = None
    """Token ids that the session may hold: prompts, each shared prefix once, and sampled ones. None: no bound."""
    num_bytes: int = 256 << 20
    """Approximate memory: messages, ids, columns of samples, pictures, the ids of all rows as they are read, answers
    that are kept for copies of their requests, and responses that later ones may name."""
    turns: int = 4096
    """Answers."""

    def refuse_time(self) -> SessionEndedError:
        """The error of a request after the session's time."""
        advice = "Make one with more seconds= (POST /sessions, gateway.session), or raise session_seconds of the server"
        return _refuse(f"its {self.seconds:g} seconds are over", advice)

    def refuse_turns(self) -> SessionEndedError:
        """The error of a request for one more answer."""
        advice = "Make a new one, or raise session_turns of the server (max_turns= of a rollout)"
        return _refuse(f"it has its {self.turns} answers, with those that are being sampled", advice)

    def refuse_tokens(self, num_held: int, num_new: int | None = None) -> SessionEndedError:
        """The error of a request whose ids do not fit. `num_new`: those of its prompt; None: not known yet."""
        adds = "" if num_new is None else f", and this request adds {num_new} and an answer"
        what = (
            f"its {self.tokens} tokens are used up: it holds {num_held} ids, those of running requests included{adds}"
        )
        advice = "Make one with more tokens= (POST /sessions, gateway.session), or raise session_tokens of the server"
        return _refuse(what, f"{advice} (max_episode_tokens= of a rollout)")

    def refuse_bytes(self, num_held: int, num_new: int = 0) -> SessionEndedError:
        """The error of a request that needs more memory than is left."""
        adds = f", and this request adds {num_new}" if num_new else ""
        what = f"its {self.num_bytes} bytes of memory are used up: messages, ids and rows take {num_held}{adds}"
        return _refuse(what, "Make a new one, or raise session_bytes of the server")


def refuse_deleted() -> SessionEndedError:
    """The error of a request to a session that is gone."""
    return SessionEndedError("The session takes no more requests: it was deleted. Make a new one.")


def _refuse(what: str, advice: str) -> SessionEndedError:
    return SessionEndedError(f"The session takes no more requests: {what}. {advice}. Its rows stay readable.")
