"""The table of unfinished requests and their sequences."""

from collections.abc import Callable, Iterable

from rollout_engine.base.errors import RequestError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.pictures import PictureInfo
from rollout_engine.base.version_pin import ends_at_commit, standing_of
from rollout_engine.core.adapters import Adapter
from rollout_engine.core.picture_keys import PictureKeys
from rollout_engine.core.request import Request, Sequence

Preparation = Callable[[float], bool]
"""Waits up to `seconds` for the work that a request needs before its first step; returns whether it is done."""
PATIENCE = 0.02
"""Seconds that a step without work waits for the preparation of a request."""


class RequestTable:
    """Unfinished requests by the id of their first sequence, and all their sequences by id.

    Held requests arrived while the engine was not running, or ask for a later policy version than the live one; they
    are scheduled from resume, wake-up, commit or end of update on. Requests in preparation are scheduled once that is
    complete; they count as in flight.
    """

    def __init__(self, pictures: PictureInfo | None = None) -> None:
        """`pictures`: how the model takes them, if it does."""
        self.picture_keys = PictureKeys(pictures)
        """Numbers that stand for pictures in the identities of KV blocks."""
        self.by_id: dict[int, Request] = {}
        """In order of arrival."""
        self._sequences: dict[int, Sequence] = {}
        self._held: dict[int, Request] = {}
        self._preparing: dict[int, Preparation] = {}
        self._num_arrived = 0

    @property
    def num_in_flight(self) -> int:
        """Number of requests that are not held."""
        return len(self.by_id) - len(self._held)

    @property
    def in_flight(self) -> list[Request]:
        """Requests that are not held."""
        return [request for first, request in self.by_id.items() if first not in self._held]

    @property
    def num_held_sequences(self) -> int:
        """Sequences of requests that are held."""
        return sum(request.source.params.n for request in self._held.values())

    def num_early_sequences(self, live: int) -> int:
        """Those of them whose request asks for a later version than `live`."""
        early = (each.source.params for each in self._held.values())
        return sum(params.n for params in early if standing_of(params, live) == "early")

    def add(self, source: EngineCoreRequest, adapter: Adapter | None = None, *, held: bool) -> Request:
        """Add a request. Raises `RequestError` when the id of one of its sequences is in use."""
        keys = self.picture_keys.keys_of(source) if source.pictures else None
        request = Request(source, self._num_arrived, adapter, keys)
        sequences = {sequence.sequence_id: sequence for sequence in request.sequences}
        if not sequences.keys().isdisjoint(self._sequences):
            bound = f"the first of {len(sequences)} ids that no unfinished sequence has"
            raise RequestError.for_field("first_sequence_id", source.first_sequence_id, bound)
        self._num_arrived += 1
        self.by_id[source.first_sequence_id] = request
        self._sequences |= sequences
        if held:
            self._held[source.first_sequence_id] = request
        return request

    def remove(self, request: Request) -> None:
        """Remove a request whose last sequence has ended."""
        del self.by_id[request.source.first_sequence_id]
        self._held.pop(request.source.first_sequence_id, None)
        self._preparing.pop(request.source.first_sequence_id, None)
        for ended in request.sequences:
            del self._sequences[ended.sequence_id]

    def num_using(self, adapter: Adapter) -> int:
        """Unfinished requests that run under `adapter`."""
        return sum(request.adapter is adapter for request in self.by_id.values())

    def live(self, sequence_id: int) -> Sequence | None:
        """The sequence with this id; None if it has ended or never existed."""
        found = self._sequences.get(sequence_id)
        return None if found is None or found.ended else found

    def filter_known(self, sequence_ids: Iterable[int]) -> set[int]:
        """The ids of these that a sequence of an unfinished request has."""
        return self._sequences.keys() & sequence_ids

    def take_held(self, live: int) -> list[Request]:
        """Return the held requests that may begin under version `live`, in order of arrival; hold them no longer."""
        held, self._held = self._held, {}
        taken = []
        for first, request in held.items():
            if standing_of(request.source.params, live) == "in range":
                taken.append(request)
            else:
                self._held[first] = request
        return taken

    def ending_at(self, version: int) -> list[Request]:
        """Requests that end, or can never begin, when weights of `version` become live."""
        return [
            request
            for first, request in self.by_id.items()
            if ends_at_commit(request.source.params, version, has_begun=self._has_begun(first, request))
        ]

    def _has_begun(self, first: int, request: Request) -> bool:
        """Whether a request is not held, or has tokens that an earlier engine sampled."""
        return first not in self._held or bool(request.source.output_token_ids)

    def hold_until_prepared(self, request: Request, preparation: Preparation) -> None:
        """Keep a request back until `preparation` is complete."""
        self._preparing[request.source.first_sequence_id] = preparation

    def take_prepared(self, seconds: float) -> list[Request]:
        """Return the requests whose preparation is complete, waiting up to `seconds` for one of them."""
        ready = [first for first, preparation in self._preparing.items() if preparation(0.0)]
        if not ready and self._preparing and seconds:
            ready = [first for first, preparation in list(self._preparing.items())[:1] if preparation(seconds)]
        for first in ready:
            del self._preparing[first]
        return [self.by_id[first] for first in ready]

    @property
    def num_preparing(self) -> int:
        """Number of requests that wait for their preparation."""
        return len(self._preparing)

    def check_integrity(self, admits: bool, version: int, num_queued: int) -> None:
        """Assert that requests, sequences and the scheduler's queues, with `num_queued` sequences, agree.

        `admits`: whether requests for `version`, the live one, are not held.
        """
        assert self._held.keys() <= self.by_id.keys(), "a request is held that has ended"
        assert self._preparing.keys() <= self.by_id.keys(), "a request is prepared that has ended"
        standings = {standing_of(request.source.params, version) for request in self._held.values()}
        assert not admits or standings <= {"early"}, "requests are held though the engine runs"
        assert "over" not in standings, "a request waits for a version that is past"
        known = {s.sequence_id: s for request in self.by_id.values() for s in request.sequences}
        assert known == self._sequences, "the sequences of live requests and the known sequences differ"
        for first, request in self.by_id.items():
            live = request.live_sequences
            joined = first not in self._held and first not in self._preparing
            assert len(live) == request.num_live > 0, f"{first}: {len(live)} live sequences, {request.num_live} counted"
            queued = [sequence for sequence in live if sequence.queue is not None]
            expected = live if request.forked else live[:joined]
            assert queued == expected, f"{first}: {len(queued)} of {len(live)} queued"
        assert num_queued == sum(s.queue is not None for s in known.values()), "a sequence of no live request is queued"
