"""Ends a run at a write of its journal, as a kill would: before it, in the middle of it, or behind it."""

import gc
from contextlib import contextmanager

import pytest

from rollout_engine.rollouts.journal import journal

EACH_KILL = pytest.mark.parametrize("distance", [17, pytest.param(1, marks=pytest.mark.slow)], ids=["few", "each"])
"""Kills at one write in `distance`, which is no multiple of three, so that kills of all kinds are among them."""


class Killed(BaseException):
    """No code of ours catches it."""


@contextmanager
def killed_at(number):
    """Raise `Killed` at write `number`, from 1. Yields a list whose length is the number of writes so far."""
    write_all, writes = journal.write_all, []

    def write(descriptor, data):
        writes.append(len(data))
        if len(writes) != number:
            write_all(descriptor, data)
            return
        if number % 3:
            write_all(descriptor, data if number % 3 == 1 else data[: len(data) // 2])
        raise Killed

    journal.write_all = write
    try:
        yield writes
    except Killed:
        pass
    finally:
        journal.write_all = write_all
        gc.collect()
