"""The messages between a core's process and its parent. Each side notices when the other ends.

parent   CoreProcess    ── CoreSettings ──────> child   core_main.serve
         wait_ready     <── Ready | Failure ──
         the socket stays open; the system closes it when either process ends
"""

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.execution.group_executor import GroupSettings
from rollout_engine.process.keys import Keys
from sync.described_types import describe_types

MAX_LIFELINE_BYTES = 1 << 20
"""Bytes of the longest of these messages."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the parent sends to the core's process."""

    protocol: int
    config: EngineConfig
    heartbeat_seconds: float
    max_backlog_bytes: int
    log_level: int
    import_path: list[str]
    """`sys.path` of the parent, on which the user's modules are found."""
    listen: str = ""
    """TCP address at which the core takes clients that have the keys; "": none."""
    keys: Keys | None = None
    group: GroupSettings | None = None
    """The engine's place among those that divide the experts of a mixture; None: it is alone."""


describe_types(CoreSettings)
