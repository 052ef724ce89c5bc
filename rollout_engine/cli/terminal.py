"""Names the work that a command waits for, and refuses to draw without a terminal, for whose keys it would wait."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.threads import start_thread

QUIET_SECONDS = 2.0
"""Longest time that a command waits without a word."""


@contextmanager
def announce(work: str) -> Iterator[None]:
    """Write a line to standard error if the block takes longer than `QUIET_SECONDS`, and another when it has ended.

    `work` is the block's task, as "loading MODEL".
    """
    start, ended = time.monotonic(), threading.Event()

    def wait() -> None:
        if not ended.wait(QUIET_SECONDS):
            print(f"{work} ...", file=sys.stderr, flush=True)

    waiting = start_thread(wait, name="announced")
    try:
        yield
    finally:
        ended.set()
        waiting.join()
    if (seconds := time.monotonic() - start) > QUIET_SECONDS:
        print(f"{work}: done in {seconds:.0f} s", file=sys.stderr, flush=True)


def require_terminal(advice: str) -> None:
    """Raise `ConfigError`, which names an alternative, unless standard input and output are a terminal."""
    for name in ("stdin", "stdout"):
        stream = getattr(sys, name)
        if stream is None or not stream.isatty():
            raise ConfigError(f"{name} is not a terminal, so nothing can be drawn or typed there: {advice}.")


def number_of(count: int, noun: str) -> str:
    """Format a count with its noun: "1 prompt", "3 prompts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextmanager
def sampling(number: int, noun: str) -> Iterator[bool]:
    """Yields whether to show a progress bar, on a terminal; elsewhere the block is announced."""
    shown = sys.stderr.isatty()
    with nullcontext() if shown else announce(f"sampling {number_of(number, noun)}"):
        yield shown
