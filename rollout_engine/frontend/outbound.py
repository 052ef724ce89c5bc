"""What steps brought, on its way to the clients: at once what somebody waits for, else several steps in one message."""

import time
from collections.abc import Callable

from rollout_engine.frontend.client_split import split
from rollout_engine.frontend.wire import Outputs
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest

HOLD_SECONDS = 0.02
"""How long tokens may wait that nobody reads before their request ends."""


class Outbound:
    """Of all clients. Whoever goes to sleep calls `flush` before."""

    def __init__(self, send: Callable[[int, Outputs], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._num_sent: dict[int, int] = {}
        self._watched: set[int] = set()
        """Live sequences whose tokens are read as they come."""
        self._held: dict[int, list[EngineCoreOutputs]] = {}
        self._held_since = 0.0

    def watch(self, request: EngineCoreRequest) -> None:
        """The core has taken a request, in its own numbers."""
        if request.params.output_kind != "final_only" or request.params.stops_on_text:
            self._watched.update(range(request.first_sequence, request.first_sequence + request.params.n))

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Send, or hold for a while, what a step or an abort brought."""
        if not (outputs.sequences or outputs.ended or outputs.num_cached_tokens or outputs.prompt_logprobs):
            return
        now = self._clock()
        if not self._held:
            self._held_since = now
        for client_index, share in split(outputs).items():
            self._held.setdefault(client_index, []).append(share)
        if outputs.ended or now - self._held_since >= HOLD_SECONDS or not self._watched.isdisjoint(outputs.sequences):
            self.flush()
            self._watched.difference_update(end.sequence for end in outputs.ended)

    def flush(self) -> None:
        """Send what is held."""
        held, self._held = self._held, {}
        for client_index, steps in held.items():
            number = self._num_sent.get(client_index, 0)
            self._num_sent[client_index] = number + 1
            self._send(client_index, Outputs(number, steps))

    def forget(self, client_index: int) -> None:
        """It has left, and what it had open has ended."""
        self._held.pop(client_index, None)
        self._num_sent.pop(client_index, None)
