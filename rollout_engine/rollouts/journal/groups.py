"""The position of a collector, and its journal: every group that it starts, samples, rewards and delivers.

A batch is returned once its `Delivered` is on the disk. So no group is in two batches; a process that is killed between
the two has delivered a batch that its trainer has not seen, and only `load_state_dict` delivers that one again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.batches.rewards import Rewards
from rollout_engine.rollouts.journal.group_records import (
    POSITIONS,
    RECORDS,
    Complete,
    Contents,
    Delivered,
    Loaded,
    Progress,
    Recalled,
    Record,
    Sampled,
    Start,
    Weights,
    output_of,
)
from rollout_engine.rollouts.journal.journal import Head, Journal, JournalOptions, Location, open_with
from rollout_engine.rollouts.journal.live_weights import NOTHING_SEEN, LiveWeights, read_change
from rollout_engine.rollouts.journal.position import (
    OpenGroup,
    Position,
    add_row,
    check_identity,
    refuse_pictures,
    refuse_row,
    row_digest,
)
from rollout_engine.rollouts.plan import GroupTask

logger = logging.getLogger("rollout_engine")

MakeIdentity = Callable[[Mapping[str, Any] | None], dict[str, Any]]
"""Returns a run's identity, given that of its journal if this is not new."""

_T = TypeVar("_T")

_MAX_VERSIONS = 64
"""Digests of weights that are kept."""
_NUM_LOGGED = 8
"""Most groups named in one log line."""


class GroupJournal:
    """The position of one collector; with a directory it is kept there, and with it the contents of groups."""

    def __init__(self, options: JournalOptions | None, make_identity: MakeIdentity, weights: LiveWeights) -> None:
        """Begin, or continue from the records in the directory. None: in memory alone, without contents.

        Raises `RequestError` for a directory that cannot be used, was altered, or holds another run.
        """
        self.options, self._weights = options, weights
        self.position = Position()
        self._contents: dict[int, Contents] = {}
        self._again: set[int] = set()
        """Groups whose next start makes their earlier records void."""
        self._before: dict[str, Any] | None = None
        self._digest, self._live, self._seen = "", -1, NOTHING_SEEN
        """Digest and version of the live weights, as they were read last; that version and the updates before it."""
        self._journal: Journal | None = None
        if options is None:
            self.identity = make_identity(None)
            return
        self._journal = open_with(options, "collect", self._take)
        try:
            self.identity = make_identity(self._before)
            if self._before is None:
                self._journal.begin(self.identity, self.position)
            check_identity(f"journal={options.directory!r}", self._before or self.identity, self.identity)
        except BaseException:
            self._journal.close()
            raise

    @property
    def keeps_contents(self) -> bool:
        """Whether samples and rewards are kept."""
        return self._journal is not None

    def observe(self) -> None:
        """Note the live weights. Contents by weights of the same version with another digest no longer count."""
        if self._journal is None:
            return
        change = read_change(self._weights, self._seen)
        if change is None:
            return
        self._seen, self._digest = change
        self._live = version = self._seen[0]
        if self.position.weights.get(version) != self._digest:
            self._write(Weights(version, self._digest))

    def load(self, position: Position) -> None:
        """Put it to the position of a trainer's checkpoint. Raises `RequestError` if that is beyond the end."""
        if self._before is not None and self.options and position.num_batches > self.position.num_batches:
            hint = f"journal={self.options.directory!r} ends before it: give the one that was written with it."
            bound = f"at most {self.position.num_batches}"
            raise RequestError.for_field("state_dict['num_batches']", position.num_batches, bound, hint)
        self._write(Loaded(position))
        if self._journal is not None:
            self._journal.sync()

    def drop_unfit(self) -> None:
        """Drop the contents of open groups that do not fit the live weights, and log for how many."""
        unfit = [index for index in sorted(self.position.open) if not self._fits(index)]
        if unfit:
            self._log_unfit(unfit)
            self.forget(unfit)

    def forget(self, indexes: Sequence[int]) -> None:
        """Drop the contents of open groups, which are started again."""
        for index in indexes:
            self._contents.pop(index, None)
        self._again.update(indexes)

    def recall(self, task: GroupTask, read_pictures: Callable[[], list[bytes]]) -> Recalled | None:
        """Read the contents of a group that is to start now; None if there are none that fit the live weights.

        `read_pictures` returns the digests of its prompt's pictures. Raises `RequestError` if the contents are those of
        another row, or of other pictures.
        """
        index = task.index
        contents = self._contents.get(index)
        if contents is None or not (contents.parts or contents.sampled):
            return None
        if not self._fits(index):
            self._log_unfit([index])
            self.forget([index])
            return None
        if contents.row not in (None, row_digest(task)):
            raise refuse_row(task)
        if contents.sampled is None:
            records = [self._read(place, Progress) for place in contents.parts]
            _check_pictures(task, records[0].pictures, read_pictures)
            return Recalled([part for each in records for part in each.parts])
        sampled = self._read(contents.sampled, Sampled)
        _check_pictures(task, sampled.pictures, read_pictures)
        output = output_of(sampled)
        if contents.complete is None:
            return Recalled(output=output)
        complete = self._read(contents.complete, Complete)
        rewards = None if complete.total is None else Rewards(complete.total, complete.by_function)
        return Recalled(output=output, is_complete=True, rewards=rewards)

    def note_start(self, task: GroupTask, row: int, *, recalled: bool) -> None:
        """Append the start of a group. `recalled`: with the contents that `recall` returned."""
        index, is_open = task.index, task.index in self.position.open
        again = index in self._again
        self._again.discard(index)
        if again or not is_open:
            self._write(Start(index, task.params.seed or 0, row, again=again and is_open, recalled=recalled))

    def note_progress(self, index: int, parts: list[CompletionOutput], pictures: list[bytes]) -> None:
        """Append new tokens of a group's samples. `pictures`: digests of its prompt's pictures."""
        if self._journal is not None:
            self.observe()
            self._write(Progress(index, parts, pictures))

    def note_samples(self, index: int, output: RequestOutput) -> None:
        """Append all samples of a group."""
        if self._journal is not None:
            self.observe()
            prompt = output.prompt, output.prompt_token_ids
            pictures = [each.picture.digest for each in output.pictures]
            self._write(Sampled(index, *prompt, output.outputs, num_dropped=output.num_dropped, pictures=pictures))

    def note_completion(self, index: int, rewards: Rewards | None) -> None:
        """Append a group's rewards, if there is a reward function."""
        if self._journal is not None:
            self._write(Complete(index) if rewards is None else Complete(index, *rewards))

    def deliver(self, indexes: list[int], *, num_pending: int, num_dropped: int) -> None:
        """Append a batch, and wait until it is on the disk."""
        self._write(Delivered(indexes, self._weights.version, num_pending, num_dropped))
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        """Release the directory. Calling it again is a no-op."""
        if self._journal is not None:
            self._journal.close()

    def _write(self, record: Record) -> None:
        location = Location(0, 0, 0)
        if self._journal is not None:
            location = self._journal.append(RECORDS.encode(record))
        self._apply(record, location)
        if self._journal is not None and self._journal.is_full:
            self._journal.begin(self.identity, self.position)
            self._remove_old_segments(self._journal)

    def _read(self, location: Location, kind: type[_T]) -> _T:
        assert self._journal is not None, "contents are in a directory"
        record = RECORDS.decode(self._journal.read_record(location))
        assert isinstance(record, kind), "a location is that of one record"
        return record

    def _take(self, location: Location, record: Head | bytes) -> None:
        """Take a record of an earlier process."""
        if not isinstance(record, Head):
            self._apply(RECORDS.decode(record), location)
        elif self._before is None:
            self._before, self.position = record.identity, POSITIONS.decode(bytes(record.state))

    def _apply(self, record: Record, location: Location) -> None:
        if isinstance(record, Weights):
            self._apply_weights(record)
        elif isinstance(record, Start):
            self._apply_start(record)
        elif isinstance(record, Delivered):
            self._apply_delivery(record)
        elif isinstance(record, Loaded):
            for version, digest in sorted(record.position.weights.items()):
                self._apply_weights(Weights(version, digest))
            self.position = msgspec.structs.replace(record.position.copy(), weights=self.position.weights)
        else:
            contents = self._contents_of(record.index)
            if isinstance(record, Complete):
                contents.complete = location
            elif isinstance(record, Sampled):
                contents.sampled = location
                contents.note_spans(record.outputs)
            else:
                contents.parts.append(location)
                contents.note_spans(record.parts)

    def _apply_start(self, record: Start) -> None:
        position = self.position
        if record.index >= position.num_rows:
            position.num_rows, position.rows = record.index + 1, add_row(position.rows, record.row)
        if not record.recalled:
            self._contents.pop(record.index, None)
        position.open[record.index] = OpenGroup(record.index, record.seed, record.row)
        position.counts.num_started += 1
        position.counts.num_regenerated += record.again

    def _apply_delivery(self, record: Delivered) -> None:
        position = self.position
        for index in record.indexes:
            position.open.pop(index, None)
        position.num_batches += 1
        position.version, position.num_pending = record.version, record.num_pending
        position.counts.num_delivered += len(record.indexes)
        position.counts.num_dropped += record.num_dropped

    def _apply_weights(self, record: Weights) -> None:
        weights = self.position.weights
        if record.version not in weights:  # tokens before this record are of weights whose digest was not read
            for contents in self._contents.values():
                contents.is_lost |= contents.holds_version(record.version)
        elif weights[record.version] != record.digest:  # a trainer that went back, to other weights
            for version in [each for each in weights if each > record.version]:
                del weights[version]
            for index in self.position.open:  # those in flight may have tokens of both that are not noted yet
                self._contents_of(index).is_lost |= self._contents_of(index).sampled is None
            for contents in self._contents.values():
                contents.is_lost |= contents.newest >= record.version
        weights[record.version] = record.digest
        for version in sorted(weights)[:-_MAX_VERSIONS]:
            del weights[version]

    def _contents_of(self, index: int) -> Contents:
        group = self.position.open.get(index)
        return self._contents.setdefault(index, Contents(row=None if group is None else group.row))

    def _fits(self, index: int) -> bool:
        contents = self._contents.get(index)
        return contents is None or contents.fits(self._live)

    def _log_unfit(self, indexes: Sequence[int]) -> None:
        shown = ", ".join(map(str, indexes[:_NUM_LOGGED])) + (", ..." if len(indexes) > _NUM_LOGGED else "")
        weights = f"version {self._live}, digest {self._digest[:12] or 'not known'}"
        logger.warning(
            "journal=%s: %d groups (%s) are sampled anew: the live weights (%s) are not those that sampled them. "
            "To continue such groups, push those weights with their version before the first batch",
            *(self.options and self.options.directory, len(indexes), shown, weights),
        )

    def _remove_old_segments(self, journal: Journal) -> None:
        open_now = [self._contents[index] for index in self.position.open if index in self._contents]
        journal.remove_before(min([each.first_segment for each in open_now], default=journal.segments[-1]))
        first = journal.segments[0]
        for index, contents in [*self._contents.items()]:
            if index not in self.position.open and contents.first_segment < first:
                del self._contents[index]


def _check_pictures(task: GroupTask, before: list[bytes] | None, read_pictures: Callable[[], list[bytes]]) -> None:
    """Raise `RequestError` if samples were drawn after other pictures than a row has now. `before`: None: not noted."""
    if before is not None and before != read_pictures():
        raise refuse_pictures(task)
