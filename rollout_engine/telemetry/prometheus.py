"""An engine's metrics as families of Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollout_engine.base.metrics import CoreMetrics, EngineMetrics, Histogram, ReplicaMetrics

Labels = Mapping[str, str]
REPLICA_STATES = ("STARTING", "STALE", "SYNCED", "DRAINING", "DEAD")
"""The states of `fleet.replica_state.ReplicaState`, which this floor must not import."""


class MetricsCollector(Collector):
    """Gives a registry the families of the moment of a scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []  # several engines may register the same names, under labels of their own

    def collect(self) -> Iterator[Metric]:
        yield from self._families()


def as_text(families: Iterable[Metric]) -> bytes:
    """Families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(lambda: families))
    return generate_latest(registry)


def own_families(metrics: EngineMetrics, labels: Labels) -> Iterator[Metric]:
    """The metrics under this library's names, `rollout_engine_*`."""
    for name, text, value in _gauges(metrics):
        yield gauge(f"rollout_engine_{name}", text, value, labels)
    for name, text, value in _counters(metrics):
        yield counter(f"rollout_engine_{name}", text, value, labels)
    finished = metrics.requests.finished.items()
    yield counters("rollout_engine_samples_finished", "Samples that ended.", "finish_reason", finished, labels)
    drafts = metrics.core.counters.drafts
    for name, text, by_place in (
        ("tokens_drafted", "Tokens drafted, by their place in the draft.", drafts.num_drafted),
        ("tokens_accepted", "Those of them that were the tokens drawn: each saved a step.", drafts.num_accepted),
    ):
        yield positions(f"rollout_engine_{name}", text, by_place, labels)
    for name, text, by_source in (
        ("draft_tokens", "Tokens drafted, by where they came from.", drafts.drafted_by_source),
        ("draft_tokens_accepted", "Those of them that were the tokens drawn.", drafts.accepted_by_source),
    ):
        yield counters(f"rollout_engine_{name}", text, "source", by_source.items(), labels)
    for name, text, values in _histograms(metrics):
        yield histogram(f"rollout_engine_{name}", text, values, labels)
    failures = metrics.core.counters.updates.failures.items()
    yield counters("rollout_engine_update_failures", "Weight updates that raised an error.", "error", failures, labels)
    if metrics.replicas:
        yield from replica_families(metrics.replicas, labels)


def replica_families(replicas: Mapping[int, ReplicaMetrics], labels: Labels) -> Iterator[Metric]:
    """The metrics of each replica of a fleet, `rollout_engine_replica_*`, distinguished by the label `replica`.

    Their names are others than those of the sums, so that summing one family counts nothing twice.
    """
    state = GaugeMetricFamily("rollout_engine_replica_state", "1 for its state.", labels=[*labels, "replica", "state"])
    for index, replica in replicas.items():
        for each in REPLICA_STATES:
            state.add_metric([*labels.values(), str(index), each], float(replica.state == each))
    yield state
    gauges = {str(index): _replica_gauges(each) for index, each in replicas.items()}
    counts = {str(index): _core_counters(each.core) for index, each in replicas.items()}
    yield from _by_replica(GaugeMetricFamily, gauges, labels)
    yield from _by_replica(CounterMetricFamily, counts, labels)


def gauge(name: str, text: str, value: float, labels: Labels) -> Metric:
    """A family of one value that goes up and down."""
    family = GaugeMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], value)
    return family


def counter(name: str, text: str, value: float, labels: Labels) -> Metric:
    """A family of one value that only grows; `_total` is added to its name."""
    family = CounterMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], value)
    return family


def counters(name: str, text: str, key: str, values: Iterable[tuple[str, float]], labels: Labels) -> Metric:
    """A family of values that only grow, distinguished by the label `key`; `_total` is added to its name."""
    family = CounterMetricFamily(name, text, labels=[*labels, key])
    for each, value in values:
        family.add_metric([*labels.values(), each], value)
    return family


def positions(name: str, text: str, values: Iterable[int], labels: Labels) -> Metric:
    """A family of one value that only grows for each place, from 0, in a draft."""
    return counters(name, text, "position", ((str(place), value) for place, value in enumerate(values)), labels)


def histogram(name: str, text: str, values: Histogram, labels: Labels) -> Metric:
    """A family of one histogram."""
    family = HistogramMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], _buckets(values), values.sum)
    return family


Values = list[tuple[str, str, float]]
"""(name, text, value) of each family."""


def _by_replica(
    kind: type[GaugeMetricFamily | CounterMetricFamily], rows: Mapping[str, Values], labels: Labels
) -> Iterator[Metric]:
    """A family of each column of `rows`, which have the same names."""
    for column in zip(*rows.values(), strict=True):
        name, text, _ = column[0]
        family = kind(f"rollout_engine_replica_{name}", text, labels=[*labels, "replica"])
        for index, (_, _, value) in zip(rows, column, strict=True):
            family.add_metric([*labels.values(), index], value)
        yield family


def _replica_gauges(replica: ReplicaMetrics) -> Values:
    return [
        ("answered", "1 where it answered this scrape; else it shows what it told last.", replica.has_answered),
        ("requests_unfinished", "Requests that it has, by the fleet's own book.", replica.num_requests),
        ("kv_tokens_assigned", "KV tokens that these requests may come to hold.", replica.num_kv_tokens),
        *_core_gauges(replica.core),
    ]


def _gauges(metrics: EngineMetrics) -> Values:
    return [
        ("requests_unfinished", "Requests that have not ended.", metrics.core.num_requests),
        *_core_gauges(metrics.core),
    ]


def _core_gauges(core: CoreMetrics) -> Values:
    return [
        ("sequences_running", "Sequences with a place in the batch.", core.num_running),
        ("sequences_waiting", "Sequences that wait for a place.", core.num_waiting),
        ("sequences_awaiting_version", "Those that ask for a later policy version.", core.num_awaiting_version),
        ("kv_cache_usage_ratio", "KV blocks referenced by live requests / all blocks.", core.cache_usage),
        ("state_slots", "Slots for states of sequences, 0 if the model's layers keep none.", core.num_state_slots),
        ("state_usage_ratio", "Those referenced by live requests / all.", core.state_usage),
        ("state_snapshots", "States that are kept to be found again.", core.num_state_snapshots),
        ("kv_connector_blocks", "KV blocks and states that the connector holds.", core.num_tier_blocks),
        ("kv_connector_bytes", "Bytes of these, counted for each engine that shares them.", core.num_tier_bytes),
        ("policy_version", "Version of the live weights.", core.policy_version),
        ("running", "1 where requests may compute, 0 while paused, asleep or dirty.", core.state == "RUNNING"),
    ]


def _counters(metrics: EngineMetrics) -> Values:
    requests = metrics.requests
    return [
        *_core_counters(metrics.core),
        ("samples_dropped", "Samples not returned because enough others had ended.", requests.dropped_samples),
        ("groups_regenerated", "Groups that a collector started again.", requests.regenerated_groups),
    ]


def _core_counters(metrics: CoreMetrics) -> Values:
    core = metrics.counters
    return [
        ("steps", "Steps of the engine.", core.num_steps),
        ("steps_failed", "Steps in which the executor raised.", core.num_failed_steps),
        ("tokens_computed", "Tokens put through the model.", core.num_tokens_computed),
        ("prompt_tokens_computed", "Prompt tokens put through the model.", core.num_prompt_tokens_computed),
        ("tokens_sampled", "Tokens sampled.", core.num_tokens_sampled),
        ("tokens_recomputed", "Tokens computed again: their KV was given up, or lost.", core.num_recomputed_tokens),
        ("tokens_looked_up", "Tokens of sequences looked up in the prefix cache.", core.num_looked_up_tokens),
        ("tokens_cached", "Those found there, under the live version.", core.num_cached_tokens),
        ("tokens_surplus", "Tokens computed past an end that was not known yet.", core.num_surplus_tokens),
        ("preemptions", "Running sequences that lost their blocks.", core.num_preemptions),
        ("update_bytes", "Bytes of the weights that complete updates brought.", core.updates.num_bytes),
        ("pictures_received", "Pictures whose arrays crossed to the engine.", core.pictures.num_received),
        ("picture_bytes_received", "Bytes of these arrays.", core.pictures.num_received_bytes),
        ("picture_cache_hits", "Pictures that the engine's process had already.", core.pictures.num_hits),
        ("pictures_encoded", "Pictures that went through the vision tower.", core.pictures.num_encoded),
        ("kv_loaded", "KV blocks and states loaded from the connector.", core.kv_tier.num_loaded),
        ("kv_loaded_tokens", "Tokens of these blocks, which were not computed.", core.kv_tier.num_loaded_tokens),
        ("kv_missed", "Lookups that the connector's blocks served in part or not at all.", core.kv_tier.num_missed),
        ("kv_saved", "KV blocks and states handed to the connector.", core.kv_tier.num_saved),
        ("kv_refused", "Those that were found damaged or foreign.", core.kv_tier.num_refused),
        ("kv_dropped", "Saves that the connector gave up.", core.kv_tier.num_dropped),
        ("kv_failures", "Calls of the connector that raised or hung.", core.kv_tier.num_failures),
        ("kv_load_seconds", "Seconds in which steps waited for loads.", core.kv_tier.load_seconds),
        ("kv_save_seconds", "Seconds spent handing blocks over.", core.kv_tier.save_seconds),
        ("expert_rounds", "Rounds of divided experts with rows of own requests.", core.rounds.num_rounds),
        ("expert_dummy_rounds", "Rounds that other engines began, without own rows.", core.rounds.num_dummies),
        ("expert_wait_seconds", "Seconds in which steps waited for other engines.", core.rounds.wait_seconds),
    ]


def _histograms(metrics: EngineMetrics) -> list[tuple[str, str, Histogram]]:
    requests, core = metrics.requests, metrics.core.counters
    return [
        ("queue_seconds", "Seconds from arrival to the first step.", requests.queue_seconds),
        ("time_to_first_token_seconds", "Seconds from arrival to it.", requests.time_to_first_token_seconds),
        ("inter_token_seconds", "Seconds between steps that brought a request tokens.", requests.inter_token_seconds),
        ("request_seconds", "Seconds from arrival to the end of the last sample.", requests.request_seconds),
        ("request_prompt_tokens", "Prompt tokens of a request.", requests.prompt_tokens),
        ("request_generation_tokens", "Sampled tokens of a request.", requests.generation_tokens),
        ("staleness_versions", "Live version - oldest of a sample, at its end.", requests.staleness),
        ("rollout_staleness_versions", "The same when a rollout is handed out.", requests.rollout_staleness),
        ("pause_seconds", "Seconds from a pause's call until it was complete.", core.pause_seconds),
        ("update_seconds", "Seconds of complete weight updates, from begin to commit.", core.updates.seconds),
        ("update_stall_seconds", "Seconds of these in which steps stood still.", core.updates.stall_seconds),
    ]


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    names = [str(bound) for bound in values.bounds] + ["+Inf"]
    return list(zip(names, accumulate(values.counts), strict=True))
