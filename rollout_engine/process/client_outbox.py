"""Messages of a client that wait to be sent to its core. One that cannot be sent is answered here."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from rollout_engine.base.errors import RequestError, RPCError
from rollout_engine.base.picture_cache import SentPictures
from rollout_engine.children.failure import failure_of
from rollout_engine.process.core_clock import CoreClock
from rollout_engine.process.core_link import CoreLink
from rollout_engine.process.parts import in_parts
from rollout_engine.process.picture_pieces import in_order
from rollout_engine.process.request_columns import check_answer
from rollout_engine.process.wire import AddRequest, Call, Encoder, ForgetPictures, Limits, Refused, Reply


class ClientOutbox:
    """A queue that any thread may fill, and one empties."""

    def __init__(self, answer_limits: Limits, clock: CoreClock) -> None:
        """`answer_limits`: the largest messages that this client reads."""
        self._answer_limits, self._clock = answer_limits, clock
        self.vocab_size = 0
        """Size of the vocabulary of the core's model; set it before the first request is sent."""
        self.num_routed_bytes = 0
        """Bytes of one token's routed experts, once the core has said so."""
        self.num_hidden_bytes = 0
        """Bytes of one token's hidden state, likewise."""
        self.pictures = SentPictures(0)
        """The pictures that the core keeps, once it has said how many bytes of them it does."""
        self._messages: deque[Any] = deque()
        self._encoder = Encoder()

    def append(self, message: Any) -> None:
        """Queue a message."""
        self._messages.append(message)

    def send(self, link: CoreLink, limits: Limits) -> list[Refused | Reply]:
        """Send waiting messages to a core that reads them within `limits`. Returns answers to unsendable ones."""
        answers: list[Refused | Reply] = []
        while self._messages:
            message = self._clock.departing(self._messages.popleft())
            try:
                if isinstance(message, AddRequest):
                    sizes = self.vocab_size, self.num_routed_bytes, self.num_hidden_bytes
                    check_answer(message, self._answer_limits, *sizes)
                for each in self._in_order(message, limits):
                    link.send(in_parts(self._encoder.encode(each), limits))
            except (TypeError, ValueError, OverflowError) as problem:
                answers.append(_refusal(message, problem))
                if isinstance(message, AddRequest) and message.request.pictures:
                    self._messages.appendleft(ForgetPictures())  # some may have been sent
        return answers

    def _in_order(self, message: Any, limits: Limits) -> Iterable[Any]:
        """The messages to send for a message: a request follows the pictures that the core lacks."""
        match message:
            case AddRequest(request) if request.pictures:
                return in_order(message, self.pictures, limits)
            case ForgetPictures():
                self.pictures.cache.clear()
        return (message,)


def _refusal(message: Any, problem: Exception) -> Refused | Reply:
    """The answer to a request or a call that cannot be sent. Raises `problem` for other messages, which always can."""
    what = f"an argument cannot be sent to the engine's process: {problem}."
    match message:
        case AddRequest(request):
            failure = failure_of(RequestError(f"generate: {what}", field="arguments"))
            return Refused(request.first_sequence_id, failure)
        case Call(number, name):
            kind = RPCError if name == "collective_rpc" else RequestError
            return Reply(number, failure=failure_of(kind(f"{name}: {what}")))
        case _:
            raise problem
