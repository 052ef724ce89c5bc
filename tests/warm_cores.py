"""Starts cores' processes by forking one that has imported everything, which takes seconds of each start.

The process that is forked, one for each process of tests, runs this module. It is asked over a socket: the request is
JSON and comes with descriptors, of which the last is a pipe. Into that go the id of the new process and, once it has
ended, its status, as one `struct` each.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys

from rollout_engine.process.core_launcher import CORE_MODULE, _environment

NUMBER = struct.Struct("=i")
NUM_DESCRIPTORS = 5
"""Standard output and error, the core's end of the lifeline, the locked file, and the pipe."""
MAX_BYTES = 1 << 20


class WarmCores:
    """Starts cores as `core_launcher._start` does; `start` takes its place."""

    def __init__(self):
        self._environment = _environment()
        self._socket = self._process = None

    def start(self, lifeline, locked, directory):
        """Start a core that inherits two descriptors; returns what can be used like a `subprocess.Popen`."""
        if self._process is None:
            self._begin()
        reader, writer = os.pipe()
        request = {"directory": directory, "environment": _environment(), "folder": os.getcwd()}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [1, 2, lifeline, locked, writer])
        finally:
            os.close(writer)
        return ForkedCore(reader)

    def close(self):
        """End the process that is forked."""
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = self._process = None

    def _begin(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        command = [sys.executable, "-P", "-m", "tests.warm_cores", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=self._environment, start_new_session=True
        )
        theirs.close()


class ForkedCore:
    """The handle of a core's process that another process has forked; used like a `subprocess.Popen`."""

    def __init__(self, reader):
        self._reader, self.returncode = reader, None
        self.pid = self._read(None)

    def __del__(self):
        os.close(self._reader)

    def poll(self):
        """Return the status, or None while the process runs."""
        return self._status(0)

    def wait(self, timeout=None):
        """Return the status once the process has ended. Raises `subprocess.TimeoutExpired`."""
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired(CORE_MODULE, timeout)
        return self.returncode

    def send_signal(self, number):
        """Send the process a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout):
        if self.returncode is None:
            self.returncode = self._read(timeout)
        return self.returncode

    def _read(self, timeout):
        if not select.select([self._reader], [], [], timeout)[0]:
            return None
        data = os.read(self._reader, NUMBER.size)
        assert data, "the process that is forked for cores has ended"
        return NUMBER.unpack(data)[0]


def serve(control):
    """Fork a core for each request, and report when it ends, until the other end of the socket is closed."""
    import rollout_engine.process.core_main  # noqa: F401

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
    parent = os.getppid()
    os.setsid()
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [CORE_MODULE, str(lifeline), str(locked), request["directory"], str(parent)]
    runpy.run_module(CORE_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
