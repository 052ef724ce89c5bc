"""Starts cores' processes by forking one that has imported everything, which takes seconds of each start.

The process that is forked, one for each process of tests, runs `tests.forked_cores`, which says what it is asked.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

from rollout_engine.process.core_launcher import CORE_MODULE, _environment

NUMBER = struct.Struct("=i")
MAX_BYTES = 1 << 20


class WarmCores:
    """Starts cores as `core_launcher._start` does; `start` takes its place."""

    def __init__(self):
        self._environment = _environment()
        self._socket = self._process = None
        self._beginning = threading.Lock()
        """A fleet starts its replicas on threads."""

    def start(self, lifeline, locked, directory):
        """Start a core that inherits two descriptors; returns what can be used like a `subprocess.Popen`."""
        with self._beginning:
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
        command = [sys.executable, "-P", "-m", "tests.forked_cores", str(theirs.fileno())]
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
        self._close()

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
            if self.returncode is not None:
                self._close()
        return self.returncode

    def _read(self, timeout):
        if not select.select([self._reader], [], [], timeout)[0]:
            return None
        data = os.read(self._reader, NUMBER.size)
        assert data, "the process that is forked for cores has ended"
        return NUMBER.unpack(data)[0]

    def _close(self):
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None
