"""Ends a thread's wait in `poll` from any other thread."""

import socket


class Waker:
    """Register it with a poller: it is readable from `wake` until `drain`."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Of the end that becomes readable."""
        return self._far.fileno()

    def wake(self) -> None:
        """From any thread; nothing once it is closed."""
        try:
            self._near.send(b"\0")
        except OSError:
            pass  # it is being wakened anyway, or has ended

    def drain(self) -> None:
        """By the thread that was wakened, before it looks for what it was wakened for."""
        try:
            while len(self._far.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Once no thread polls it any more."""
        self._near.close()
        self._far.close()
