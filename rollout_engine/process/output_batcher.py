"""Batches outputs per client: outputs that are streamed leave at once, others with those of later steps."""

import time
from collections.abc import Callable

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.process.client_routing import split
from rollout_engine.process.wire import Outputs

HOLD_SECONDS = 0.02
"""Seconds for which outputs of requests that do not stream are held."""


class OutputBatcher:
    """Batches outputs per client; call `flush` before blocking."""

    def __init__(self, send: Callable[[int, Outputs], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._watched: set[int] = set()
        """Live sequences whose tokens are streamed."""
        self._held: dict[int, list[EngineCoreOutputs]] = {}
        self._held_since = 0.0

    def watch(self, request: EngineCoreRequest) -> None:
        """Send the tokens of this request at once if they are streamed, or looked through for stop strings."""
        if request.params.output_kind != "final_only" or request.params.stops_on_text:
            self._watched.update(range(request.first_sequence_id, request.first_sequence_id + request.params.n))

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Send or hold the outputs of a step or an abort."""
        if not (outputs.sequence_ids or outputs.ended or outputs.num_cached_tokens or outputs.prompt_logprobs):
            return
        now = self._clock()
        if not self._held:
            self._held_since = now
        for client_index, share in split(outputs).items():
            self._held.setdefault(client_index, []).append(share)
        streams = not self._watched.isdisjoint(outputs.sequence_ids)
        if outputs.ended or now - self._held_since >= HOLD_SECONDS or streams:
            self.flush()
            self._watched.difference_update(end.sequence_id for end in outputs.ended)

    def flush(self) -> None:
        """Send all held outputs."""
        held, self._held = self._held, {}
        for client_index, steps in held.items():
            self._send(client_index, Outputs(steps))

    def forget(self, client_index: int) -> None:
        """Drop the held outputs of a client that has left; its requests have been aborted."""
        self._held.pop(client_index, None)
