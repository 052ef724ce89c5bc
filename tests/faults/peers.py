"""Raw ends of the socket between clients and a core: they say whatever they like."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError
from rollout_engine.children.failure import WireError
from rollout_engine.engine.client import EngineInfo
from rollout_engine.process.authentication import Authenticator, make_token, read_token, show_token
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.parts import Assembler, in_parts
from rollout_engine.process.wire import (
    PROTOCOL,
    Decoder,
    Encoder,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Limits,
    Ready,
    Rejected,
    ToClient,
    ToCore,
    Welcome,
)

INFO = EngineInfo(
    max_prefill_beside_decode=0,
    config=EngineConfig(model="m"),
    num_blocks=1,
    block_size=1,
    max_model_len=1,
    vocab_size=7,
    eos_token_ids=[],
    dtype="float32",
    choices="",
)
READY = Ready(protocol=PROTOCOL, pid=1, config_digest="", heartbeat_seconds=0.5, policy_version=0, info=INFO)
Frames = list[bytes]
_LIMITS = Limits()


class RawClient:
    """A client of the core that lives in `directory`, by frames; it knows what must be rejected."""

    def __init__(
        self, directory: str | Path, *, hello: bool = True, receive_limit: int = 1000, limits: Limits = _LIMITS
    ) -> None:
        """`receive_limit`: messages that wait for it here before they wait in the core. `limits`: what it takes."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 256)  # so that it waits for the core, not in memory
        self._socket.setsockopt(zmq.RCVHWM, receive_limit)
        self._socket.setsockopt(zmq.RCVBUF, 4096)
        show_token(self._socket, read_token(directory))
        self._socket.connect(address_in(directory))
        self._encoder = Encoder()
        self._assembler, self._to_core = Assembler(Decoder[Any](ToClient), limits), Decoder[Any](ToCore)
        self.num_bad = self.num_rejected = 0
        """Frames thrown that are no message or not one for now; rejections received."""
        self.is_gone = False
        """The core said farewell."""
        if hello:
            self.say(Hello(PROTOCOL, limits))
            assert isinstance(self.hear(), Welcome)

    def say(self, message: Any) -> None:
        """Send a message as it should be."""
        for frames in in_parts(self._encoder.encode(message), _LIMITS):
            self.send([bytes(frame) for frame in frames])

    def send(self, frames: Frames) -> None:
        """Send any frames."""
        self._socket.send_multipart(frames)

    def hear(self, *, skip: tuple[type, ...] = (Heartbeat,), seconds: float = 60.0) -> Any:
        """The next message, of another kind than `skip`."""
        while isinstance(message := self._read(1000 * seconds), skip):
            pass
        assert message is not None, "nothing came"
        return message

    def throw(self, frames: Frames) -> bool:
        """Send any frames, except a goodbye that would be one, and read what comes. Returns whether they were sent."""
        try:
            message = self._to_core.decode(frames)
        except WireError:
            self.num_bad += 1
        else:
            if isinstance(message, Goodbye):
                return False
            self.num_bad += isinstance(message, Hello)
        while not self._socket.poll(0, zmq.POLLOUT):
            self.read_all(10)
        self.send(frames)
        self.read_all(0)
        return True

    def read_all(self, milliseconds: float) -> None:
        """Take what has come, waiting so long for the first."""
        while not self.is_gone and self._read(milliseconds) is not None:
            milliseconds = 0

    def wait_rejected(self, seconds: float = 300.0) -> None:
        """Until every bad frame has been answered."""
        deadline = time.monotonic() + seconds
        while self.num_rejected < self.num_bad and not self.is_gone:
            assert time.monotonic() < deadline, f"{self.num_rejected} of {self.num_bad} bad frames were rejected"
            self.read_all(100)

    def close(self, *, linger: float = 0.0) -> None:
        """Be gone, without a goodbye, giving what was sent so many seconds to go out."""
        self._socket.close(int(1000 * linger))
        self._context.term()

    def _read(self, milliseconds: float) -> Any:
        if not self._socket.poll(milliseconds):
            return None
        message = None
        while message is None:
            message = self._assembler.read(self._socket.recv_multipart())
        self.num_rejected += isinstance(message, Rejected)
        self.is_gone |= isinstance(message, Farewell)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_gone:
            self.say(Goodbye())
        self.close(linger=5.0)


class RawCore:
    """A core that is none: it welcomes a real client and then says what it is told to."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._authenticator = Authenticator(self._context, make_token(directory))
        self._authenticator.guard(self._router)
        self._router.bind(address_in(directory))
        self._guarding = True
        self._guard = threading.Thread(target=self._let_in)
        self._guard.start()
        self._encoder = Encoder()
        self.heard: list[Any] = []
        """What clients were told and took for outputs."""

    def tell(self, messages: list[Frames], seconds: float = 60.0) -> EngineDeadError | None:
        """Make a client and send it `messages`, then a heartbeat and a farewell. Returns what it died of.

        AssertionError if it is neither dead nor listening in the end.
        """
        client = ClientSocket.connect(self._directory, hang_seconds=seconds)
        died = threading.Event()
        client.listen(self.heard.append, lambda _: died.set())
        try:
            assert self._router.poll(1000 * seconds), "no client came"
            identity, *_ = self._router.recv_multipart()
            for frames in (self._frames(Welcome(0, READY)), *messages, self._frames(Heartbeat())):
                self._router.send_multipart([identity, *frames])
            self._router.send_multipart([identity, *self._frames(Farewell("the raw core has said all"))])
            assert died.wait(seconds), "the client neither listens nor is dead"
            return client.dead_error
        finally:
            client.close()
            while self._router.poll(0):
                self._router.recv_multipart()

    def close(self) -> None:
        """Free the socket."""
        self._guarding = False
        self._guard.join()
        self._authenticator.close()
        self._router.close()
        self._context.term()

    def _let_in(self) -> None:
        while self._guarding:
            self._authenticator.socket.poll(10)
            self._authenticator.answer()

    def _frames(self, message: Any) -> Frames:
        return [bytes(frame) for frame in self._encoder.encode(message)]
