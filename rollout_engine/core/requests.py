"""Who has not ended, and by which names."""

from rollout_engine.core.request import Request, Sequence
from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreRequest


class Requests:
    """Unfinished requests and their sequences, by id. A request's names are free again when its last sample has ended.

    Some are held: they came while the engine was not running, and join at resume, wake-up or the end of an update.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        """In order of arrival."""
        self._sequences: dict[str, Sequence] = {}
        self._held: dict[str, Request] = {}
        self._num_arrived = 0

    @property
    def num_in_flight(self) -> int:
        """Those that are not held."""
        return len(self.by_id) - len(self._held)

    @property
    def in_flight(self) -> list[Request]:
        """Those that are not held."""
        return [request for name, request in self.by_id.items() if name not in self._held]

    def add(self, source: EngineCoreRequest, *, held: bool) -> Request:
        """A new one. Raises `RequestError` when one of its names is in use."""
        if source.request_id in self.by_id:
            raise RequestError.for_field("request_id", source.request_id, "unique among unfinished requests")
        request = Request(source, self._num_arrived)
        for sequence in request.sequences:
            if sequence.sequence_id in self._sequences:
                other = self._sequences[sequence.sequence_id].request.source.request_id
                hint = f"It would name a sequence '{sequence.sequence_id}', and so does unfinished request '{other}'."
                raise RequestError.for_field("request_id", source.request_id, "distinct from all sequence ids", hint)
        self._num_arrived += 1
        self.by_id[source.request_id] = request
        self._sequences.update((sequence.sequence_id, sequence) for sequence in request.sequences)
        if held:
            self._held[source.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        """Its last sample has ended."""
        del self.by_id[request.source.request_id]
        self._held.pop(request.source.request_id, None)
        for ended in request.sequences:
            del self._sequences[ended.sequence_id]

    def named(self, name: str) -> list[Sequence]:
        """Sequences not ended that `name` means, the leader last: a request's, or else the one of that child id."""
        if name in self.by_id:
            return self.by_id[name].live_sequences[::-1]
        found = self._sequences.get(name)
        return [] if found is None or found.ended else [found]

    def take_held(self) -> list[Request]:
        """Those held, in order; they are not any more."""
        taken, self._held = list(self._held.values()), {}
        return taken

    def check_integrity(self, *, may_hold: bool, num_queued: int) -> None:
        """Sequences, requests and the scheduler's queues, where `num_queued` stand, agree."""
        assert self._held.keys() <= self.by_id.keys(), "a request is held that has ended"
        assert may_hold or not self._held, "requests are held though the engine runs"
        known = {s.sequence_id: s for request in self.by_id.values() for s in request.sequences}
        assert known == self._sequences, "the sequences of live requests and the known sequences differ"
        for name, request in self.by_id.items():
            live = request.live_sequences
            joined = name not in self._held
            assert len(live) == request.num_live > 0, f"{name}: {len(live)} live sequences, {request.num_live} counted"
            queued = [sequence for sequence in live if sequence.queue is not None]
            expected = live if request.forked else live[:joined]
            assert queued == expected, f"{name}: {len(queued)} of {len(live)} queued"
        assert num_queued == sum(s.queue is not None for s in known.values()), "a stranger is queued"
