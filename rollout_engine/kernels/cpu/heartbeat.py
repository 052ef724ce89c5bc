"""ctypes wrapper of `heartbeat.cpp`."""

import os
from ctypes import c_char_p, c_int32, c_void_p

from rollout_engine.kernels.cpu import build

INTERVAL_SECONDS = 0.1


def start_heartbeat(beats: int | None, lifeline: int, directory: str, orphan_seconds: float) -> bool:
    """Start a thread that adds 1 to the uint64 at address `beats` ten times a second, until this process ends.

    Without `beats` it sends a byte over the socket `lifeline` each time. Once the other end of that socket has been
    closed for `orphan_seconds`, the thread removes `directory`, unless that is "", and ends the process. Returns False
    if the kernels cannot be built. Raises `OSError` for a thread that cannot start.
    """
    if build.load_kernels() is None:
        return False
    start = build.declared(heartbeat_start=(c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32)).heartbeat_start
    interval = int(1000 * INTERVAL_SECONDS)
    error = start(beats, lifeline, os.fsencode(directory), interval, int(1000 * orphan_seconds))
    if error:
        raise OSError(error, "the heartbeat's thread cannot start")
    return True
