"""Ownership by one process: threads, locks and sockets do not survive a fork."""

import os

_num_forks = 0
"""How many forks lie between the first process and this one."""


def _count() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


class OwnProcess:
    """The process in which this object was made."""

    __slots__ = ("_generation", "_pid")

    def __init__(self) -> None:
        self._pid, self._generation = os.getpid(), _num_forks

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a forked child of it. As cheap as a comparison."""
        return self._generation == _num_forks

    def explain(self, what: str) -> str:
        """The message of an error that a forked child gets for using `what`."""
        where = f"{what} belongs to process {self._pid}; this is process {os.getpid()}, forked from it"
        return f"{where}. Use it in that process alone; a forked process makes one of its own."
