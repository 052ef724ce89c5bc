"""Signals that end a core's process: SIGTERM lets requests in flight end first, as Kubernetes and Ray expect."""

import signal
from types import FrameType

from rollout_engine.process.inbox import Drain, Inbox, Stop


def end_on_signals(inbox: Inbox) -> None:
    """Put a `Drain` into the inbox at the first SIGTERM, a `Stop` at SIGINT or the second; ignore more of them."""

    def drain(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, stop)
        inbox.put_first(Drain(_reason(number)))

    def stop(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        inbox.put_first(Stop(_reason(number)))

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, stop)


def _reason(number: int) -> str:
    return f"it received {signal.Signals(number).name}"
