"""Bounds of one session."""

import msgspec


class SessionLimits(msgspec.Struct, frozen=True):
    """A request that would exceed one of these is refused with `SessionEndedError`."""

    seconds: float = 3600.0
    """Time in which requests are taken. The rows can be read for as long again, then the session is deleted."""
    tokens: int | None = None
    """Token ids that the session may hold: prompts, each shared prefix once, and sampled ones. None: no bound."""
    num_bytes: int = 256 << 20
    """Approximate memory of the session's messages, ids and columns of samples."""
    turns: int = 4096
    """Answers."""
