"""Refuses to draw where no terminal is: in a pipe a live view would wait for a key for ever."""

import sys

from rollout_engine.errors import ConfigError


def require_terminal(advice: str) -> None:
    """Raise `ConfigError`, with what to do instead, unless standard input and output are a terminal."""
    for name in ("stdin", "stdout"):
        stream = getattr(sys, name)
        if stream is None or not stream.isatty():
            raise ConfigError(f"{name} is not a terminal, so nothing can be drawn or typed there: {advice}.")
