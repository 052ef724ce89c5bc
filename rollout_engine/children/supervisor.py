"""Runs one program of the user's, and kills all that it has started when it ends: a process between owner and program.

    python -I -S supervisor.py OWNER STATUS LC_CTYPE COMMAND [ARGUMENT ...]

    OWNER    process id of the owner; Linux sends SIGTERM when it ends
    STATUS   descriptor for the lines "failed REASON", or "started PID" and then "ended CODE", CODE as of `subprocess`
    LC_CTYPE the program's variable of this name; empty: it has none (Python sets one for itself, PEP 538)
    stdin    a pipe of the owner's: closing it kills the program. The program itself reads an empty input.

On Linux all descendants of the program are killed, those too that have left its process group or its session: they
become children of this process when their parents end (PR_SET_CHILD_SUBREAPER). Elsewhere its process group is killed.
It runs as a script, and imports the standard library alone, so that it starts in some ten milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IS_LINUX = sys.platform == "linux"
_RESET = [number for name in ("SIGPIPE", "SIGXFSZ") if (number := getattr(signal, name, None)) is not None]
"""Signals that Python ignores, and that a program expects to have their default effect."""


def main() -> None:
    """Run the program to its end."""
    owner, status, locale, *command = sys.argv[1:]
    os.environ.pop("LC_CTYPE", None)
    if locale:
        os.environ["LC_CTYPE"] = locale
    wakes = _wake_on_signals()
    _watch_owner(int(owner))
    os.set_inheritable(int(status), False)
    try:
        program = _start(command)
    except (OSError, ValueError) as problem:
        _report(int(status), f"failed {getattr(problem, 'strerror', None) or problem}")
        return
    _report(int(status), f"started {program}")
    code = _wait(program, wakes)
    last = _kill_all(program)
    code = last if code is None else code
    _report(int(status), f"ended {0 if code is None else code}")


def _wake_on_signals() -> int:
    """Have signals write to a pipe; returns the end to read."""
    wakes, to_wake = os.pipe()
    os.set_blocking(to_wake, False)
    signal.set_wakeup_fd(to_wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _do_nothing)
    return wakes


def _watch_owner(owner: int) -> None:
    """Get SIGTERM when the owner ends, and adopt the descendants of this process that lose their parents."""
    if _IS_LINUX:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != owner:
        sys.exit("the owner has ended")


def _start(command: list[str]) -> int:
    """Start the program in a session of its own, with an empty input; returns its process id."""
    empty = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    if _IS_LINUX:
        return os.posix_spawnp(command[0], command, os.environ, file_actions=empty, setsid=True, setsigdef=_RESET)
    return os.posix_spawnp(command[0], command, os.environ, file_actions=empty, setpgroup=0, setsigdef=_RESET)


def _wait(program: int, wakes: int) -> int | None:
    """Wait for the program, the owner or SIGTERM, whichever is first. Returns the program's status if it has ended."""
    while True:
        readable, _, _ = select.select([0, wakes], [], [])
        code = _reap(program)
        if code is not None:
            return code
        if 0 in readable or {signal.SIGTERM, signal.SIGINT} & set(os.read(wakes, 4096)):
            return None


def _reap(program: int) -> int | None:
    """Remove the children that have ended. Returns the program's status if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == program:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _kill_all(program: int) -> int | None:
    """Kill the program's group and all descendants, and wait for them. Returns the program's status if it still ran."""
    code = None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:  # the children of one that has ended are children of this process now
            for child in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            found, status = os.waitpid(-1, 0)
            if found == program:
                code = os.waitstatus_to_exitcode(status)
    return code


def _children() -> list[int]:
    """Process ids of the children of this process."""
    found = []
    for name in os.listdir("/proc") if _IS_LINUX else ():
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _report(status: int, line: str) -> None:
    """Write a line for the owner, if it still reads."""
    with suppress(OSError):
        os.write(status, line.replace("\n", " ").encode(errors="replace") + b"\n")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Let the signal write to the pipe."""


if __name__ == "__main__":
    main()
