"""One result made of those of many engines, for the verbs that run on every engine of a fleet."""

from collections.abc import Sequence
from functools import reduce
from itertools import chain, zip_longest
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.kept_samples import KeptSamples
from rollout_engine.base.metrics import CoreMetrics, CoreStats, Histogram
from rollout_engine.engine.health import Health


def nothing(results: Sequence[None]) -> None:
    """Return None, once every engine has completed the call."""


def end_to_end(results: Sequence[list[Any]]) -> list[Any]:
    """The lists of all engines, concatenated."""
    return list(chain.from_iterable(results))


def mean(results: Sequence[float]) -> float:
    """Mean over the engines."""
    return sum(results) / len(results)


def samples(results: Sequence[KeptSamples]) -> KeptSamples:
    """The samples of all engines by prompt, each once: the prompts that any engine has seen last at the end."""
    prompts: dict[bytes, dict[bytes, np.ndarray]] = {}
    newest_first = (reversed(list(each.prompts())) for each in results)
    for key, kept in filter(None, chain.from_iterable(zip_longest(*newest_first))):
        prompts[key] = {sample.tobytes(): sample for sample in kept} | prompts.get(key, {})
    return KeptSamples.of([(key, [*samples.values()]) for key, samples in reversed(prompts.items())])


def health(results: Sequence[Health]) -> Health:
    """Counts of all engines, and the state of one that does not run, if there is one; the version that lags most."""
    worst = next((each for each in results if each.state != "RUNNING"), results[0])
    return msgspec.structs.replace(
        worst,
        is_ready=any(each.is_ready for each in results),
        busy_seconds=max(each.busy_seconds for each in results),
        policy_version=min(each.policy_version for each in results),
        num_unfinished_requests=sum(each.num_unfinished_requests for each in results),
        num_steps=sum(each.num_steps for each in results),
        io=reduce(_add_values, (each.io for each in results)),
        stuck="; ".join(each.stuck for each in results if each.stuck),
    )


def metrics(results: Sequence[CoreMetrics]) -> CoreMetrics:
    """Counts of all engines and the mean of their cache usage; the version of the one that lags most."""
    return CoreMetrics(
        num_requests=sum(each.num_requests for each in results),
        num_running=sum(each.num_running for each in results),
        num_waiting=sum(each.num_waiting for each in results),
        cache_usage=mean([each.cache_usage for each in results]),
        policy_version=min(each.policy_version for each in results),
        state=next((each.state for each in results if each.state != "RUNNING"), "RUNNING"),
        counters=counters([each.counters for each in results]),
        num_state_slots=sum(each.num_state_slots for each in results),
        state_usage=mean([each.state_usage for each in results]),
        num_state_snapshots=sum(each.num_state_snapshots for each in results),
        num_awaiting_version=sum(each.num_awaiting_version for each in results),
        num_tier_blocks=sum(each.num_tier_blocks for each in results),
        num_tier_bytes=sum(each.num_tier_bytes for each in results),
    )


def counters(parts: Sequence[CoreStats]) -> CoreStats:
    """Sums over the engines; the longest of their last pauses."""
    total = reduce(_add_values, parts)
    return msgspec.structs.replace(total, last_pause_seconds=max(each.last_pause_seconds for each in parts))


def _add_values(first: Any, second: Any) -> Any:
    """The sum of two numbers, or of two structs, lists or dicts of numbers, entry by entry."""
    match first, second:
        case Histogram(), Histogram():
            counts = [a + b for a, b in zip(first.counts, second.counts, strict=True)]
            return Histogram(first.bounds, counts, first.sum + second.sum)
        case msgspec.Struct(), msgspec.Struct():
            names = first.__struct_fields__
            return type(first)(**{name: _add_values(getattr(first, name), getattr(second, name)) for name in names})
        case list(), list():
            return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
        case dict(), dict():
            return {name: first.get(name, 0) + second.get(name, 0) for name in first | second}
    return first + second
