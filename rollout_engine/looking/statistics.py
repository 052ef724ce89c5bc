"""Statistics of one training step: of its batch of rollouts, and of the engine since the step before.

name                             of one step
reward/mean std min max          rewards of its samples; reward/NAME: the mean of one reward function. An episode of
                                 several rows counts once, one that failed not at all
length/mean min max              sampled tokens of a sample, of an episode in all its rows
length/truncated                 share of samples that were cut off
episodes/failed                  share of episodes that failed
entropy                          nats per token: mean of ("entropy", "full") of rollouts with SamplingParams(entropy=
                                 True); else mean of -log-prob of the sampled tokens. That estimates the entropy
                                 of the distribution they were drawn from, at the temperature of the log-probs; with
                                 top-k, top-p, min-p or penalties it does not
kl                               nats per token, from the rollouts' policy to the trainer's: mean of r - 1 - log r, r
                                 the ratio of the trainer's probability of a token to the engine's. Exactly 0 if
                                 both are the same to the bit
kl/max_ratio                     largest of max(r, 1 / r)
staleness/mean max               versions between the weights that sampled a token and those that were live when the
                                 rollout was returned: 0 on policy, though the weights were updated since
tokens                           sampled tokens
tokens_per_second                the same, per second since the step before
seconds                          since the step before
engine/tokens_per_second         tokens that the engine sampled since the step before, of this batch or not
engine/stall_seconds             time since the step before in which weight updates held generation up
engine/pause_seconds             time since the step before in which pauses were completed
engine/update_seconds            time of weight updates, during generation or not
engine/cached_share              share of looked-up tokens that were found in the prefix cache
engine/preemptions               sequences that lost their blocks
engine/cache_usage               share of KV blocks in use, at the moment
engine/state_usage               share of slots for states in use, at the moment, if the model's layers keep states
engine/policy_version            version of the live weights
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.metrics import CoreStats, EngineMetrics
from rollout_engine.base.provenance import rollout_note
from rollout_engine.batches.episodes import counted, episodes
from rollout_engine.batches.layout import check_batch, full_places

Numbers = dict[str, float]


def batch_statistics(
    batch: TensorDictBase, *, live_version: int | None = None, trainer_logprobs: Tensor | None = None
) -> Numbers:
    """The statistics of a batch in either layout, as far as it has the keys they are made of.

    `live_version`: version of the live weights, for the staleness of a batch that has lost its note of it (a plain
    TensorDict). `trainer_logprobs`: the trainer's log-probs of the
    same tokens, of the shape of batch["log_probs", "full"], or without its first column, as `exact.token_logprobs`
    returns them. Raises `RequestError` for another shape, and for an object that is no rollout.
    """
    check_batch(batch)
    mask = batch["masks", "all_assistant_mask"]
    samples, by_row = episodes(batch), [float(mask[place].sum()) for place in full_places(batch)]
    lengths = torch.tensor([sum(by_row[row] for row in rows) for rows in samples])
    logprobs = batch["log_probs", "full"][mask].double()
    found: Numbers = {"tokens": float(len(logprobs))}
    if len(lengths):
        found |= _spread("length", lengths)
    if "truncated" in batch.keys():
        found["length/truncated"] = float(batch["truncated"][[rows[0] for rows in samples]].double().mean())
    if "episode_id" in batch.keys() and samples:
        found["episodes/failed"] = sum(not counted(batch)[rows[0]] for rows in samples) / len(samples)
    if len(logprobs):
        found["entropy"] = float(-logprobs.mean())
        if "entropy" in batch.keys():
            found["entropy"] = float(batch["entropy", "full"][mask].double().mean())
    found |= _rewards(batch)
    versions = batch["policy_version"][mask]
    note = rollout_note(batch["tokens", "full"])
    if note is not None and note.live_version is not None:
        live_version = note.live_version
    if live_version is not None and len(versions):
        ages = (live_version - versions).clamp(min=0).double()
        found |= {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
    if trainer_logprobs is not None:
        found |= _divergence(batch["log_probs", "full"], trainer_logprobs, mask)
    return found


class EngineRates:
    """The work of an engine between two calls, from its counters."""

    def __init__(self, read: Callable[[], EngineMetrics], clock: Callable[[], float] = time.perf_counter) -> None:
        """`read` returns the metrics of now, as `get_metrics` of a policy does."""
        self._read, self._clock = read, clock
        self._last, self._time = read().core.counters, clock()

    def __call__(self) -> Numbers:
        """The numbers since the last call, or since this was made."""
        core, now = self._read().core, self._clock()
        before, counters, seconds = self._last, core.counters, now - self._time
        self._last, self._time = counters, now
        looked_up = counters.num_looked_up_tokens - before.num_looked_up_tokens
        cached = counters.num_cached_tokens - before.num_cached_tokens
        return {
            "seconds": seconds,
            "engine/tokens_per_second": (counters.num_tokens_sampled - before.num_tokens_sampled) / max(seconds, 1e-9),
            **dict(_times(before, counters)),
            **({"engine/cached_share": cached / looked_up} if looked_up > 0 else {}),
            "engine/preemptions": float(counters.num_preemptions - before.num_preemptions),
            "engine/cache_usage": core.cache_usage,
            **({"engine/state_usage": core.state_usage} if core.num_state_slots else {}),
            "engine/policy_version": float(core.policy_version),
        }


def _times(before: CoreStats, now: CoreStats) -> Iterator[tuple[str, float]]:
    yield "engine/stall_seconds", now.updates.stall_seconds.sum - before.updates.stall_seconds.sum
    yield "engine/update_seconds", now.updates.seconds.sum - before.updates.seconds.sum
    yield "engine/pause_seconds", now.pause_seconds.sum - before.pause_seconds.sum


def _rewards(batch: TensorDictBase) -> Numbers:
    keys = set(batch.keys(include_nested=True))
    rows = [rows[0] for rows in episodes(batch) if counted(batch)[rows[0]]]
    if ("next", "reward") not in keys or not rows:
        return {}
    rewards = batch["next", "reward"][rows].flatten().double()
    found = _spread("reward", rewards) | {"reward/std": float(rewards.std(correction=0))}
    for key in keys:
        if isinstance(key, tuple) and key[0] == "rewards" and key != ("rewards", "turn"):
            given = batch[key][rows].flatten().double()
            given = given[~given.isnan()]  # NaN: the function does not apply to the sample
            if len(given):
                found[f"reward/{key[1]}"] = float(given.mean())
    return found


def _spread(name: str, values: Tensor) -> Numbers:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }


def _divergence(logprobs: Tensor, given: Any, mask: Tensor) -> Numbers:
    rows, columns = logprobs.shape
    shapes = ((rows, columns), (rows, columns - 1))
    if not isinstance(given, Tensor) or tuple(given.shape) not in shapes:
        shown = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        bound = f"{list(shapes[0])}, or {list(shapes[1])} as exact.token_logprobs returns it"
        raise RequestError.for_field("trainer_logprobs.shape", shown, bound)
    first = columns - given.shape[1]
    kept = mask[:, first:]
    differences = given.detach().to(logprobs.device)[kept].double() - logprobs[:, first:][kept].double()
    if not len(differences):
        return {}
    largest = min(float(differences.abs().max()), 700.0)  # beyond, a float64 overflows
    return {"kl": float((differences.expm1() - differences).mean()), "kl/max_ratio": math.exp(largest)}
