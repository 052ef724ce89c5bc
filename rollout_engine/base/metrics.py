"""Counters and timings of an engine as plain numbers, and the protocol of loggers that report them."""

from bisect import bisect_left
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Protocol, get_args

import msgspec

from rollout_engine.base.outputs import FinishReason, UpdateReport

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = tuple(float(2**i) for i in range(18))
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


class Histogram(msgspec.Struct):
    """Counts of values per bucket."""

    bounds: tuple[float, ...]
    """Upper bounds, inclusive, ascending."""
    counts: list[int]
    """Values per bucket: one for each bound, and a last one above all bounds."""
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Make an empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of all values; 0.0 without any."""
        return self.sum / max(self.count, 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the `q`-quantile, 0 < q <= 1: inf above all bounds, 0.0 if empty."""
        wanted = q * self.count
        reached = (bound for bound, total in zip(self.bounds, accumulate(self.counts), strict=False) if total >= wanted)
        return next(reached, float("inf")) if wanted else 0.0


class UpdateStats(msgspec.Struct):
    """Weight updates since start."""

    seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_LONG))
    """Duration of complete updates, from begin to commit; near 0 when the weights were live already."""
    stall_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Time of complete updates in which generation could not step."""
    num_bytes: int = 0
    """Size of the weights that complete updates brought."""
    failures: dict[str, int] = {}
    """Name of the error's class -> updates that raised it; "Aborted" and "ClientLeft" count updates that were begun by
    calls and not completed. Replaced, never changed: other threads read it."""

    def count(self, update: Callable[[], UpdateReport]) -> UpdateReport:
        """Run an update, and count how it ends."""
        try:
            report = update()
        except Exception as error:
            self.add_failure(type(error).__name__)
            raise
        self.add_complete(report.seconds, report.stall_seconds, report.num_bytes)
        return report

    def add_complete(self, seconds: float, stall_seconds: float, num_bytes: int) -> None:
        """Count an update that was committed, or whose weights were live already."""
        self.seconds.observe(seconds)
        self.stall_seconds.observe(stall_seconds)
        self.num_bytes += num_bytes

    def add_failure(self, kind: str) -> None:
        """Count an update that failed, by the name of its error."""
        self.failures = {**self.failures, kind: self.failures.get(kind, 0) + 1}


class DraftStats(msgspec.Struct):
    """Drafted tokens since start, by their place in the draft, where the first is entry 0, and by their source."""

    num_drafted: list[int] = []
    num_accepted: list[int] = []
    """Of these, those that were the tokens drawn. Each saved its sequence a step."""
    drafted_by_source: dict[str, int] = {}
    """Tokens from "rollouts" and "ngram", the sources of `SpeculationConfig`, and from the "draft_model"."""
    accepted_by_source: dict[str, int] = {}

    def count(self, source: str, num_drafted: int, num_accepted: int) -> None:
        """Count one draft of so many tokens, of which the first so many were right."""
        for counts, num in ((self.drafted_by_source, num_drafted), (self.accepted_by_source, num_accepted)):
            counts[source] = counts.get(source, 0) + num
        missing = [0] * (num_drafted - len(self.num_drafted))
        self.num_drafted += missing
        self.num_accepted += missing
        for place in range(num_drafted):
            self.num_drafted[place] += 1
            self.num_accepted[place] += place < num_accepted


class PictureStats(msgspec.Struct):
    """Pictures since start. The same one in two requests, or twice in one, counts twice."""

    num_received: int = 0
    """Pictures whose arrays were sent to the engine's process; 0 for an engine in this one."""
    num_received_bytes: int = 0
    """Bytes of these arrays."""
    num_hits: int = 0
    """Pictures of requests that the engine's process had already, so that a digest was sent; 0 for one in this."""
    num_encoded: int = 0
    """Pictures that went through the vision tower."""


class KVTierStats(msgspec.Struct):
    """Blocks of KV, and states, that crossed to and from a KV connector since start; all 0 without one."""

    num_loaded: int = 0
    """Blocks and states that were loaded in place of being computed."""
    num_loaded_tokens: int = 0
    """Tokens of these blocks; part of `CoreStats.num_cached_tokens`."""
    num_missed: int = 0
    """Blocks that were looked up and not held, or not given: at most one for each sequence that is looked up."""
    num_saved: int = 0
    """Blocks and states that were handed to the connector."""
    num_refused: int = 0
    """Blocks and states that were found torn, damaged, foreign or of a wrong length, and were computed instead."""
    num_dropped: int = 0
    """Saves that the connector gave up: its queue or its store was full, or writing failed."""
    num_failures: int = 0
    """Calls of the connector that raised or took too long."""
    load_seconds: float = 0.0
    """Time in the connector's `load` and `holds`, which steps wait for."""
    save_seconds: float = 0.0
    """Time in its `save`."""


class RoundStats(msgspec.Struct):
    """Rounds of engines that divide a mixture's experts, since start; all 0 without `data_parallel_size`."""

    num_rounds: int = 0
    """Rounds with rows of this engine's own requests: one for each forward."""
    num_dummies: int = 0
    """Rounds without: another engine had begun them, and this one computed its experts alone."""
    wait_seconds: float = 0.0
    """Time in which steps of this engine waited for the others."""


class CoreStats(msgspec.Struct):
    """Counters of the engine core since start."""

    num_steps: int = 0
    num_failed_steps: int = 0
    """Steps in which the executor raised."""
    num_tokens_computed: int = 0
    num_prompt_tokens_computed: int = 0
    num_tokens_sampled: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again: preemption, `kv="recompute"` or a reset had taken their KV, or the engine that had it is
    gone: a lost replica, an earlier process of a journal."""
    num_looked_up_tokens: int = 0
    """Tokens of sequences that were looked up in the prefix cache when they were admitted to run."""
    num_cached_tokens: int = 0
    """Looked-up tokens that were found in the cache, and so not computed: only blocks of the live version match."""
    num_preemptions: int = 0
    """Running sequences that lost their blocks."""
    num_references_dropped: int = 0
    """Forked sequences that lost their blocks while they waited."""
    num_block_copies: int = 0
    last_pause_seconds: float = 0.0
    """Time from the call of the last pause until it was complete."""
    pause_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """The same for all pauses."""
    updates: UpdateStats = msgspec.field(default_factory=UpdateStats)
    num_surplus_tokens: int = 0
    """Computed tokens of sequences that had ended while the step was in flight; what they sampled is dropped."""
    drafts: DraftStats = msgspec.field(default_factory=DraftStats)
    step_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_TOKENS))
    """Tokens computed in a step."""
    pictures: PictureStats = msgspec.field(default_factory=PictureStats)
    kv_tier: KVTierStats = msgspec.field(default_factory=KVTierStats)
    rounds: RoundStats = msgspec.field(default_factory=RoundStats)

    def add_pause(self, seconds: float) -> None:
        """Count a pause that took `seconds` to complete."""
        self.last_pause_seconds = seconds
        self.pause_seconds.observe(seconds)


def staleness(live_version: int, policy_versions: Collection[int]) -> int:
    """Versions between the oldest token of a sample and the live weights; 0 after a version was set back."""
    return max(live_version - min(policy_versions), 0)


class RequestStats(msgspec.Struct):
    """Timings of requests, measured on the caller's side of the engine."""

    finished: dict[FinishReason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    """Samples that ended, by `finish_reason`."""
    queue_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Seconds from arrival to the start of the first step that computed part of the prompt."""
    time_to_first_token_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Seconds from arrival to the first sampled token."""
    inter_token_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Between the starts of two successive steps that sampled tokens of a request."""
    request_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_LONG))
    """Seconds from arrival to the end of the last sample."""
    prompt_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_TOKENS))
    """Per request."""
    generation_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_TOKENS))
    """Per request, all samples."""
    inference_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_LONG))
    """Per request, seconds from the start of its first step to its end."""
    prefill_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Per request, seconds from the start of its first step to its first sampled token."""
    decode_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_LONG))
    """The rest of these."""
    token_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_SHORT))
    """Per request, mean of the seconds between two tokens of a sample."""
    asked_samples: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_TOKENS))
    """`n` of a request."""
    asked_max_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_TOKENS))
    """`max_tokens` of a request that gives it."""
    staleness: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_VERSIONS))
    """Per sample with tokens, at its end."""
    rollout_staleness: Histogram = msgspec.field(default_factory=lambda: Histogram.over(_VERSIONS))
    """The same when `RolloutPolicy` returns the sample: the staleness that the trainer sees."""
    dropped_samples: int = 0
    """Samples that are not returned because enough others of their prompt had ended (`oversample`)."""
    regenerated_groups: int = 0
    """Groups that a collector started again: they had become too stale, or an abort had cut them short."""


class CoreMetrics(msgspec.Struct):
    """State and counters of an engine core at one moment."""

    num_requests: int
    """Unfinished."""
    num_running: int
    """Sequences in the batch."""
    num_waiting: int
    """Sequences that wait to join it."""
    cache_usage: float
    """KV blocks referenced by live requests / all blocks."""
    policy_version: int
    state: str
    """"RUNNING", "PAUSED", ... of `core.lifecycle.State`."""
    counters: CoreStats
    num_state_slots: int = 0
    """Slots for states of sequences; 0: the model's layers keep none."""
    state_usage: float = 0.0
    """Slots referenced by live requests / all slots."""
    num_state_snapshots: int = 0
    """States that are kept to be found again."""
    num_awaiting_version: int = 0
    """Those of `num_waiting` whose request asks for a later policy version than the live one."""
    num_tier_blocks: int = 0
    """Blocks and states that the KV connector holds, as far as it reports them; 0 without one."""
    num_tier_bytes: int = 0
    """Bytes of these."""


class ReplicaMetrics(msgspec.Struct):
    """State and counters of one replica of a fleet at one moment."""

    state: str
    """"STARTING", "STALE", "SYNCED", "DRAINING" or "DEAD" of `fleet.replica_state.ReplicaState`."""
    has_answered: bool
    """Whether `core` is of now. Else it is what the replica told last; one without an engine runs nothing."""
    num_requests: int
    """Requests of this client that the replica has and that have not ended."""
    num_kv_tokens: int
    """KV tokens that these requests may come to hold."""
    core: CoreMetrics
    """Its version is that of the fleet's book, -1 without an engine; its counters include those of engines that it has
    lost."""


class EngineMetrics(msgspec.Struct):
    """Metrics of one engine at one moment."""

    core: CoreMetrics
    """Counters and gauges of the engine; for a fleet the sum of its replicas'."""
    requests: RequestStats
    replicas: dict[int, ReplicaMetrics] = {}
    """Replicas of a fleet by their index; empty for one engine."""


class StatLogger(Protocol):
    """Receives an engine's metrics. Given as `stat_loggers=[...]`, or by an entry point of the group
    `rollout_engine.stat_loggers` that names a class without arguments.

    `log` and `close` are called on a thread of the logger's own: waiting there blocks no step, and an exception is
    logged once. A logger that is slow misses calls: the next one has the newest metrics and the sum of the seconds.
    """

    def attach(self, read: Callable[[], EngineMetrics]) -> None:
        """Called once, when the engine is up. `read` returns the current metrics; any thread may call it."""

    def log(self, metrics: EngineMetrics, seconds: float) -> None:
        """Called every `log_interval` seconds while there is work, and when the engine falls idle.

        `seconds`: time with work since the last call.
        """

    def close(self) -> None:
        """Called when the engine is shut down."""
