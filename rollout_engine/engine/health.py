"""Signs of life of an engine."""

import msgspec


class IoStats(msgspec.Struct):
    """Counts of the core's end of its socket since start; all 0 if there is none."""

    num_clients: int = 0
    """Clients that are connected now."""
    num_rejected: int = 0
    """Messages that could not be decoded, or were sent by unknown peers."""
    num_clients_cut_off: int = 0
    """Clients that stopped reading."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `check_health`."""

    pid: int
    """Process id of the core's process."""
    state: str
    """RUNNING, PAUSED, ASLEEP, UPDATING or DIRTY, as in `core.lifecycle`; ENDING: it received SIGTERM, refuses requests
    and ends with those in flight."""
    is_ready: bool
    """Whether a request that is added now joins those in flight."""
    busy_seconds: float
    """How long the step or verb in progress has taken so far; 0.0 while there is none."""
    policy_version: int
    num_unfinished_requests: int
    """Unfinished requests of all clients."""
    num_steps: int
    io: IoStats
    stuck: str = ""
    """Name of the step, call or plug-in that has not ended within `EngineConfig.step_deadline` and cannot be
    interrupted. Reported by an engine in this process alone: a core in another one ends."""
