"""A logits processor and a worker extension that do not return, and shorten the deadline while they do not."""

import ctypes
import threading
import time
from contextlib import contextmanager

from worker_ext.base import WorkerExtension, rpc

SHORT = 0.5


@contextmanager
def short_deadline():
    """While no honest step runs: one may take long on a busy machine."""
    watchdogs = [thread._target.__self__ for thread in threading.enumerate() if thread.name == "step-watchdog"]
    usual = [watchdog.seconds for watchdog in watchdogs]
    for watchdog in watchdogs:
        watchdog.seconds = SHORT
    try:
        yield
    finally:
        for watchdog, seconds in zip(watchdogs, usual, strict=True):
            watchdog.seconds = seconds


class Stuck:
    """Gets stuck at the fourth token of a request that says how."""

    def __init__(self, vocab_size):
        pass

    def wants(self, params):
        return "stuck" in (params.extra_args or {})

    def apply(self, logits, sequence):
        if len(sequence.output_token_ids) == 3:
            with short_deadline():
                if sequence.params.extra_args["stuck"] == "waits":
                    threading.Event().wait()
                while True:
                    time.sleep(0.001)
        return logits


class StuckExtension(WorkerExtension):
    @rpc
    def hold_interpreter(self, seconds: int) -> None:
        """Let no other thread run Python."""
        ctypes.PyDLL(None).sleep(seconds)

    @rpc
    def loop(self) -> None:
        with short_deadline():
            while True:
                time.sleep(0.001)
