"""The process that owns an object: threads, locks and sockets do not survive a fork."""

import os

_num_forks = 0
"""How many forks lie between the first process and this one."""


def _count() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


class OwnerProcess:
    """The process in which the owning object was made."""

    __slots__ = ("_generation", "_pid")

    def __init__(self) -> None:
        self._pid, self._generation = os.getpid(), _num_forks

    @property
    def is_current(self) -> bool:
        """Whether the current process is that one, and not a forked child of it. As cheap as a comparison."""
        return self._generation == _num_forks

    def error_message(self, what: str) -> str:
        """The error message for a forked child that uses `what`."""
        where = f"{what} belongs to process {self._pid}; this is process {os.getpid()}, forked from it"
        return f"{where}. Use it in that process alone; a forked process makes one of its own."
