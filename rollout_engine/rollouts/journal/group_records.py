"""Records of a collector's journal, and those of one group together.

Start ── Progress ── Progress ── Sampled ── Complete ── Delivered
         new tokens of unfinished samples   all of them, then their rewards
"""

import sys
from collections.abc import Sequence

import msgspec

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.batches.rewards import Rewards
from rollout_engine.rollouts.journal.journal import Location
from rollout_engine.rollouts.journal.position import Position
from rollout_engine.rollouts.journal.records import RecordCodec


class Weights(msgspec.Struct, tag="weights", frozen=True):
    """A version was live for the first time, or again with other weights."""

    version: int
    digest: str


class Start(msgspec.Struct, tag="start", frozen=True):
    """A group was started."""

    index: int
    seed: int
    row: int
    """Digest of its row."""
    again: bool = False
    """Whether it had been started before, and its earlier records no longer count."""
    recalled: bool = False
    """Whether its earlier records count: it had been started behind the position that was loaded."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """New tokens of a group's samples; each part begins behind those of earlier records."""

    index: int
    parts: list[CompletionOutput]
    pictures: list[bytes] | None = None
    """Digests of the prompt's pictures; None: not noted."""


class Sampled(msgspec.Struct, tag="sampled", frozen=True):
    """All samples of a group have ended."""

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_dropped: int = 0
    pictures: list[bytes] | None = None
    """As in `Progress`."""


class Complete(msgspec.Struct, tag="complete", frozen=True):
    """A group has its rewards, and its listeners have received it."""

    index: int
    total: list[float] | None = None
    by_function: dict[str, list[float | None]] = {}


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    """Groups were made a batch."""

    indexes: list[int]
    version: int
    num_pending: int
    num_dropped: int = 0


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The collector was put to another position by `load_state_dict`."""

    position: Position


Record = Weights | Start | Progress | Sampled | Complete | Delivered | Loaded

RECORDS: RecordCodec[Record] = RecordCodec(Record)
POSITIONS: RecordCodec[Position] = RecordCodec(Position)


class Recalled(msgspec.Struct):
    """The journal's content of a group that was not delivered."""

    parts: list[CompletionOutput] = []
    """Tokens of samples that had not all ended, in order."""
    output: RequestOutput | None = None
    """All samples; pictures are those of the prompt, which are not kept."""
    is_complete: bool = False
    rewards: Rewards | None = None


class Contents(msgspec.Struct):
    """Places of a group's records, and the versions that sampled it."""

    row: int | None = None
    """Digest of its row."""
    parts: list[Location] = []
    sampled: Location | None = None
    complete: Location | None = None
    newest: int = -1
    oldest: int | None = None
    is_lost: bool = False
    """Whether the weights that sampled it no longer exist: the trainer went back, and made others."""

    @property
    def first_segment(self) -> int:
        """The first segment that has a record of it; a large number without any."""
        places = [*self.parts, self.sampled, self.complete]
        return min([each.segment for each in places if each], default=sys.maxsize)

    def note_spans(self, samples: Sequence[CompletionOutput]) -> None:
        """Note the versions of more tokens."""
        for span in (span for sample in samples for span in sample.version_spans):
            oldest = min(span.policy_version, span.kv_min_version)
            self.newest = max(self.newest, span.policy_version)
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def holds_version(self, version: int) -> bool:
        """Whether tokens of `version` may be among its own."""
        return self.oldest is not None and self.oldest <= version <= self.newest

    def fits(self, live: int) -> bool:
        """Whether it can be delivered, or continued, under the live version."""
        if self.is_lost:
            return False
        if self.sampled is None:
            return self.oldest is None or self.newest == self.oldest == live
        return self.newest <= live


def output_of(sampled: Sampled) -> RequestOutput:
    """The output of the request that sampled a group."""
    return RequestOutput(
        request_id=f"journal-{sampled.index}",
        prompt=sampled.prompt,
        prompt_token_ids=sampled.prompt_token_ids,
        prompt_logprobs=None,
        outputs=sampled.outputs,
        finished=True,
        num_cached_tokens=0,
        num_dropped=sampled.num_dropped,
    )
