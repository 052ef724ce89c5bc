"""Checks in forked children."""

import os
import sys
import traceback


def in_fork(check):
    """Run `check` in a forked child; what it raises fails the test."""
    end_fork(start_fork(check))


def start_fork(check):
    """Begin to run `check` in a forked child, which `end_fork` waits for."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def end_fork(child):
    """Wait for a forked child; what its check has raised fails the test."""
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see the child's traceback"
