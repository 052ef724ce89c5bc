"""Starts child processes of this package: their environment, and the module that they run."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_engine.base.parent_death import module_command, start_process

_END_SECONDS = 5.0
"""Seconds that a process has to end before it is killed."""


def start_module(
    module: str,
    arguments: Sequence[str],
    *,
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    death_signal: int = signal.SIGKILL,
) -> "subprocess.Popen[bytes]":
    """Run a module of this package in a new process, which inherits these descriptors.

    Linux sends it `death_signal` when this process ends (`rollout_engine.base.parent_death`).
    """
    return start_process(
        module_command(module, arguments, death_signal),
        stdin=subprocess.DEVNULL,
        pass_fds=list(descriptors),
        env=environment,
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process that ends by itself, and kill it if that takes long."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment_with_package() -> dict[str, str]:
    """This process's environment, in which a child imports this copy of the package."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
