"""An engine that samples at once: the client seam with nothing behind it, so that only the server is measured."""

from typing import Any

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.engine.client import ANYWHERE, EngineInfo, Listener, Route


class InstantClient:
    """Answers every request by its `max_tokens` tokens, before `add_request` returns.

    Args:
        info: of a real engine, which it stands in for.
        answers: False: requests get a first token and stay open.
    """

    index, needs_turns, policy_version = 0, False, 0
    dead_error: EngineDeadError | None = None

    def __init__(self, info: EngineInfo, *, answers: bool = True) -> None:
        self.info, self._answers = info, answers

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def add_request(self, request: EngineCoreRequest, route: Route = ANYWHERE) -> None:
        ids = [request.first_sequence_id + index for index in range(request.params.n)]
        count = request.max_tokens if self._answers else 1
        for step in range(count):
            is_last = step == count - 1 and self._answers
            ended = [SequenceEnd(each, "length") for each in ids] if is_last else []
            logprobs = None if request.params.logprobs is None else [-1.5] * len(ids)
            tokens = [100 + step % 50] * len(ids)
            self._listener.deliver(EngineCoreOutputs(0, ids, tokens, [0] * len(ids), logprobs=logprobs, ended=ended))

    def abort(self, sequence_ids: list[int]) -> None:
        ended = [SequenceEnd(each, "abort") for each in sequence_ids]
        if ended:
            self._listener.deliver(EngineCoreOutputs(0, ended=ended))

    def call(self, name: str, arguments: Any) -> Any:
        raise LookupError(f"an instant engine has no verb {name}")

    def require_usable(self) -> None: ...

    def shutdown(self) -> None: ...
