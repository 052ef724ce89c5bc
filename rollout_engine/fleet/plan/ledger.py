"""The ledger of a fleet: every request that has not ended, which replica has it, and the tokens it has so far.

A request whose replica is lost continues at another one after the tokens it has. Draws depend on the sequence seed and
the position alone, so under the same weights it gets the tokens that it would have had.
"""

from collections.abc import Iterable

import msgspec

from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.seeds import child_seed

_MOST_PENDING = 1 << 16
"""Most tokens kept as received, step by step, before they are sorted by sequence."""


class Entry:
    """A request until all of its samples have ended."""

    __slots__ = ("aborted", "attempt", "is_whole", "live", "refused_by", "replica", "request", "session_id")

    def __init__(self, request: EngineCoreRequest, session_id: str | None) -> None:
        self.request, self.session_id = request, session_id
        first = request.first_sequence_id
        self.live = dict.fromkeys(range(first, first + request.params.n))
        """Ids of the sequences that have not ended, in order."""
        self.aborted: set[int] = set()
        """Those of them that are to end, as soon as their replica reports it."""
        self.replica: int | None = None
        """The replica that has it; None while it waits for one."""
        self.attempt = 0
        """How many replicas had it before."""
        self.refused_by: set[int] = set()
        """Replicas that could not take it just now, since it was last at one that did."""
        self.is_whole = True
        """Whether its replica has the request as it was added, and not the rest of it, a sample at a time."""

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens of KV that the request may hold."""
        return len(self.request.prompt_token_ids) + self.request.params.n * self.request.max_tokens


class Ledger:
    """All requests of a fleet's client that have not ended, and their tokens."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        """By the id of each live sequence."""
        self._pending: list[tuple[list[int], list[int]]] = []
        """(sequence ids, token ids) of each step that has not been sorted."""
        self._num_pending = 0
        self._tokens: dict[int, list[int]] = {}
        """Sequence id -> tokens that have been sorted."""
        self._foreign: dict[int, dict[int, int]] = {}
        """Replica -> sequences that were taken from it, until it reports their ends; and the id under
        which it got each of them: that of the first sequence of its request."""

    def __len__(self) -> int:
        return len(self.entries())

    def entries(self) -> list[Entry]:
        """The requests that have not ended, oldest first."""
        return list(dict.fromkeys(self._entries.values()))

    def of_replica(self, replica: int | None) -> list[Entry]:
        """The requests that a replica has; None: those that wait for one."""
        return [entry for entry in self.entries() if entry.replica == replica]

    def add(self, request: EngineCoreRequest, session_id: str | None = None) -> Entry:
        """Open an entry for a request whose sequence ids are new."""
        entry = Entry(request, session_id)
        self._entries |= dict.fromkeys(entry.live, entry)
        return entry

    def get(self, sequence_id: int) -> Entry | None:
        """The entry of a live sequence."""
        return self._entries.get(sequence_id)

    def record_outputs(self, replica: int, outputs: EngineCoreOutputs) -> list[Entry]:
        """Note a replica's outputs for sequences that it has; returns the entries that have ended with them.

        Removed from `outputs` are rows and ends of sequences that were taken from the replica, and the
        ends of those that it gives up because it ends itself: others continue them.
        """
        if self._foreign.get(replica):
            self._drop_foreign(replica, outputs)
        if outputs.ended:
            outputs.ended = [end for end in outputs.ended if not end.is_given_up]
        if outputs.num_cached_tokens or outputs.prompt_logprobs:
            self._drop_repeated(outputs)
        if outputs.sequence_ids:
            self._pending.append((outputs.sequence_ids, outputs.token_ids))
            self._num_pending += len(outputs.sequence_ids)
            if self._num_pending > _MOST_PENDING:
                self._sort()
        return self._end_sequences(end.sequence_id for end in outputs.ended)

    def moves(self, entry: Entry, *, replica_lives: bool, has_refused: bool = False) -> None:
        """Take a request from its replica. That replica's later outputs for it are dropped, until its ends there.

        `has_refused`: the replica could not take it just now.
        """
        if has_refused and entry.replica is not None:
            entry.refused_by.add(entry.replica)
        else:
            entry.refused_by.clear()
        if replica_lives and entry.replica is not None:
            first = entry.request.first_sequence_id
            came = {sequence_id: first if entry.is_whole else sequence_id for sequence_id in entry.live}
            self._foreign.setdefault(entry.replica, {}).update(came)
        entry.replica, entry.attempt = None, entry.attempt + 1

    def record_loss(self, replica: int) -> None:
        """Note that a replica sends nothing any more."""
        self._foreign.pop(replica, None)

    def record_refusal(self, replica: int, first_sequence_id: int) -> bool:
        """Note that a replica did not take a request. Returns whether that was taken from it before."""
        foreign = self._foreign.get(replica, {})
        refused = [sequence_id for sequence_id, first in foreign.items() if first == first_sequence_id]
        for sequence_id in refused:
            del foreign[sequence_id]
        return bool(refused)

    def record_abort(self, sequence_ids: Iterable[int]) -> dict[int | None, list[int]]:
        """Note that live sequences are to end. Returns them by replica; those under None are at none."""
        found: dict[int | None, list[int]] = {}
        for sequence_id in dict.fromkeys(sequence_ids):
            if (entry := self._entries.get(sequence_id)) is not None:
                entry.aborted.add(sequence_id)
                found.setdefault(entry.replica, []).append(sequence_id)
        return found

    def end(self, sequence_ids: Iterable[int]) -> list[Entry]:
        """Remove sequences; returns the entries that have ended with them."""
        return self._end_sequences(sequence_ids)

    def rest(self, entry: Entry) -> tuple[list[EngineCoreRequest], list[SequenceEnd]]:
        """Requests for the rest that another replica has to compute, and the ends of samples without a rest.

        The request as it was added, if no sample has a token yet; else one request for each live sample.
        """
        self._sort()
        if not entry.aborted and len(entry.live) == entry.request.params.n:
            if not any(sequence_id in self._tokens for sequence_id in entry.live):
                return [entry.request], []
        requests, ends = [], []
        for sequence_id in entry.live:
            tokens = entry.request.output_token_ids + self._tokens.get(sequence_id, [])
            end = end_of_tokens(entry.request, sequence_id, tokens)
            if sequence_id in entry.aborted:
                ends.append(SequenceEnd(sequence_id, "abort"))
            elif end is not None:
                ends.append(end)
            else:
                requests.append(make_continuation(entry.request, sequence_id, tokens))
        return requests, ends

    def check_integrity(self) -> None:
        """Raise AssertionError if sequences and entries do not match, or tokens belong to no live sequence."""
        for sequence_id, entry in self._entries.items():
            assert sequence_id in entry.live, f"sequence {sequence_id} has ended and is listed"
            assert entry.aborted <= entry.live.keys(), f"sequences {entry.aborted - entry.live.keys()} have ended twice"
        self._sort()
        assert self._tokens.keys() <= self._entries.keys(), "tokens are kept of sequences that have ended"

    def _end_sequences(self, sequence_ids: Iterable[int]) -> list[Entry]:
        ended = []
        for sequence_id in sequence_ids:
            entry = self._entries.pop(sequence_id, None)
            self._tokens.pop(sequence_id, None)
            if entry is not None:
                del entry.live[sequence_id]
                entry.aborted.discard(sequence_id)
                if not entry.live:
                    ended.append(entry)
        return ended

    def _drop_foreign(self, replica: int, outputs: EngineCoreOutputs) -> None:
        foreign, ids, ended = self._foreign[replica], outputs.sequence_ids, outputs.ended
        own = [row for row, sequence_id in enumerate(ids) if sequence_id not in foreign]
        if len(own) < len(ids):
            outputs.keep_rows(own)
        outputs.ended = [end for end in ended if end.sequence_id not in foreign]
        of_prompts = "prompt_logprobs", "prompt_routed_experts", "prompt_hidden_states"
        for name in ("num_cached_tokens", "pooled", *of_prompts):
            setattr(outputs, name, {id: value for id, value in getattr(outputs, name).items() if id not in foreign})
        for end in ended:
            foreign.pop(end.sequence_id, None)

    def _drop_repeated(self, outputs: EngineCoreOutputs) -> None:
        """Drop outputs for the prompt from the rest of a request: its user has got them already."""
        for name in ("num_cached_tokens", "prompt_logprobs"):
            column = getattr(outputs, name)
            setattr(outputs, name, {id: value for id, value in column.items() if self._is_whole(id)})

    def _is_whole(self, sequence_id: int) -> bool:
        entry = self._entries.get(sequence_id)
        return entry is not None and entry.is_whole

    def _sort(self) -> None:
        pending, self._pending, self._num_pending = self._pending, [], 0
        entries, tokens = self._entries, self._tokens
        for sequence_ids, token_ids in pending:
            for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
                if sequence_id in entries:
                    tokens.setdefault(sequence_id, []).append(token_id)


def end_of_tokens(request: EngineCoreRequest, sequence_id: int, tokens: list[int]) -> SequenceEnd | None:
    """The end of a sample whose last token was received without it; None if the sample has not ended."""
    if tokens and len(tokens) >= request.params.min_tokens:
        if tokens[-1] in request.eos_token_ids:
            return SequenceEnd(sequence_id, "stop")
        if tokens[-1] in (request.params.stop_token_ids or ()):
            return SequenceEnd(sequence_id, "stop", tokens[-1])
    return SequenceEnd(sequence_id, "length") if len(tokens) >= request.max_tokens else None


def make_continuation(request: EngineCoreRequest, sequence_id: int, tokens: list[int]) -> EngineCoreRequest:
    """The request for the rest of one sample, behind all its tokens so far."""
    states = request.params.return_hidden_states and "sampled"
    return msgspec.structs.replace(
        request,
        params=msgspec.structs.replace(request.params, n=1, prompt_logprobs=None, return_hidden_states=states),
        seed=child_seed(request.seed, sequence_id - request.first_sequence_id),
        first_sequence_id=sequence_id,
        output_token_ids=tokens.copy(),
    )
