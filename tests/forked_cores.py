"""The process that is forked for cores, run as `python -m tests.forked_cores DESCRIPTOR`; it has imported everything.

It is asked over a socket: the request is JSON and comes with descriptors, of which the last is a pipe. Into that go the
id of the new process and, once it has ended, its status, as one `struct` each.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys

import rollout_engine.process.core_main  # noqa: F401
from rollout_engine.process.core_launcher import CORE_MODULE
from tests.warm_cores import MAX_BYTES, NUMBER

NUM_DESCRIPTORS = 5
"""Standard output and error, the core's end of the lifeline, the locked file, and the pipe."""


def serve(control):
    """Fork a core for each request, and report when it ends, until the other end of the socket is closed."""
    waker, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    pipes = {}
    while True:
        ready = select.select([control, waker], [], [])[0]
        if waker in ready:
            waker.recv(4096)
            _report_ends(pipes)
        if control in ready:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, NUM_DESCRIPTORS)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for unwanted in (control, waker, woken):
                    unwanted.close()
                for pipe in (*pipes.values(), descriptors[-1]):
                    os.close(pipe)
                try:
                    _be_core(json.loads(data), *descriptors[:-1])
                finally:
                    os._exit(1)
            pipes[pid] = descriptors[-1]
            os.write(descriptors[-1], NUMBER.pack(pid))
            for descriptor in descriptors[:-1]:
                os.close(descriptor)


def _report_ends(pipes):
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = pipes.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody asks any more
            os.write(pipe, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _be_core(request, out, err, lifeline, locked):
    """Become a core's process: its own session, the environment and descriptors of whoever asked."""
    os.setsid()
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [CORE_MODULE, str(lifeline), str(locked), request["directory"]]
    runpy.run_module(CORE_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
