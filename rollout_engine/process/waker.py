"""Wakes a thread that waits in `poll`, from any other thread."""

import socket


class Waker:
    """A pair of sockets to register with a poller: readable from `wake` until `drain`."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Descriptor of the end that becomes readable."""
        return self._far.fileno()

    def wake(self) -> None:
        """Make it readable. Any thread may call it; no-op once closed."""
        try:
            self._near.send(b"\0")
        except OSError:
            pass  # a wake is pending already, or it is closed

    def drain(self) -> None:
        """Make it unreadable. Call it before looking for the work that it announced."""
        try:
            while len(self._far.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Free both sockets. Call it once no thread polls it any more."""
        self._near.close()
        self._far.close()
