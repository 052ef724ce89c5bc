"""Turns finished groups into the TensorDict of a rollout, and counts how stale their samples are."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.metrics import staleness
from rollout_engine.base.provenance import RolloutNote, attach
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.support import is_over_support
from rollout_engine.batches.jsonl import samples
from rollout_engine.batches.output_samples import output_samples
from rollout_engine.batches.rewards import Rewards
from rollout_engine.batches.rollout_batch import Layout, rollout_batch
from rollout_engine.batches.summary import RolloutBatch
from rollout_engine.engine.interrupts import allowed, held
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.agents.episode import AgentGroup
from rollout_engine.rollouts.agents.rows import agent_batch
from rollout_engine.rollouts.episodes.rows import episode_batch
from rollout_engine.rollouts.episodes.run import EpisodeGroup
from rollout_engine.rollouts.log import RolloutLog
from rollout_engine.rollouts.run import Group

logger = logging.getLogger("rollout_engine")

AnyGroup = Group | EpisodeGroup | AgentGroup

OnGroup = Callable[[RolloutBatch], Any]
"""Called with the TensorDict of one group."""


class GroupListeners(NamedTuple):
    """Receivers of each group as soon as it is complete."""

    on_group: OnGroup | None = None
    log: RolloutLog | None = None


class GroupBatcher:
    """Makes batches of one engine's groups. Any thread may call it."""

    def __init__(self, frontend: Frontend) -> None:
        info = frontend.client.info
        self._frontend = frontend
        self._dtype = info.dtype
        self._fp32_head = info.dtype != "float32" and info.config.fp32_head
        self._quantization = info.config.quantization
        self._has_processors = bool(info.config.logits_processors)
        self.pad_token_id = _pad_token_id(frontend)
        self._counting = threading.Lock()

    def batch(self, groups: Sequence[AnyGroup], layout: Layout) -> RolloutBatch:
        """Make one TensorDict of groups of one rollout, in their order."""
        of_prompts = [group for group in groups if isinstance(group, Group)]
        of_agents = [each for group in groups if isinstance(group, AgentGroup) for each in group.episodes]
        if of_prompts:
            batch = self._batch_of_prompts(of_prompts, layout)
        elif of_agents:
            batch = agent_batch(of_agents, self._frontend.inputs.codec, pad_token_id=self.pad_token_id, layout=layout)
        else:
            episodes = [each for group in groups if isinstance(group, EpisodeGroup) for each in group.episodes]
            batch = episode_batch(episodes, self._frontend.inputs.codec, pad_token_id=self.pad_token_id, layout=layout)
        return self.describe(batch, [group.params for group in groups], [group.lora for group in groups], layout)

    def describe(
        self, batch: RolloutBatch, params: Sequence[SamplingParams], adapters: Sequence[str | None], layout: Layout
    ) -> RolloutBatch:
        """Note the settings of its sampling on a batch, and give hidden states the model's dtype. Returns the batch."""
        if "hidden_states" in batch.keys():
            batch["hidden_states"] = batch["hidden_states"].to(getattr(torch, self._dtype))
        over_support = not self._has_processors and "support" in batch.keys() and all(map(is_over_support, params))
        temperature = _logprob_temperature(params, over_support)
        note = self.note(temperature, adapters, is_packed=layout == "packed")
        sampled = {each.temperature or 1.0 for each in params}
        sampled_temperature = sampled.pop() if len(sampled) == 1 else None
        note = note._replace(sampled_temperature=sampled_temperature, over_support=over_support)
        attach(batch["tokens", "full"], note._replace(has_pictures="pictures" in batch.keys()))
        return batch

    def note(self, temperature: float | None, adapters: Iterable[str | None], *, is_packed: bool) -> RolloutNote:
        """The note on the engine's settings and version under these adapters (None: the base alone)."""
        known = self._dtype, temperature, is_packed, self._fp32_head, self._quantization
        return RolloutNote(*known, frozenset(adapters), self._frontend.client.policy_version)

    def _batch_of_prompts(self, groups: Sequence[Group], layout: Layout) -> RolloutBatch:
        rewards = [group.rewards for group in groups if group.rewards is not None]
        return rollout_batch(
            [group.output for group in groups],
            pad_token_id=self.pad_token_id,
            group_ids=[group.index for group in groups],
            columns={name: [group.task.columns[name] for group in groups] for name in groups[0].task.columns},
            rewards=[each.total for each in rewards] or None,
            function_rewards=_by_function(rewards),
            oversampled=groups[0].task.num_kept is not None,
            layout=layout,
        )

    def samples(self, group: AnyGroup) -> Iterable[dict[str, Any]]:
        """The samples of a group as `rollout_engine.batches.jsonl` describes them."""
        if isinstance(group, EpisodeGroup | AgentGroup):
            return samples(self.batch([group], "padded"))
        rewards = group.rewards
        total, by_function = (None, {}) if rewards is None else (rewards.total, rewards.by_function)
        return output_samples(group.output, group.index, group.task.columns, total, by_function)

    def tell(self, listeners: GroupListeners, group: AnyGroup, layout: Layout) -> None:
        """Pass the TensorDict of a group to its listeners."""
        if any(listeners):
            batch = None if listeners.on_group is None else self.batch([group], layout)
            with allowed():
                if listeners.log is not None:
                    listeners.log.write(self.samples(group), group.params, group.index)
                if listeners.on_group is not None and batch is not None:
                    listeners.on_group(batch)

    def count_staleness(self, groups: Sequence[AnyGroup]) -> None:
        """Add the samples of groups that are handed out now to the engine's metrics."""
        live, histogram = self._frontend.client.policy_version, self._frontend.streams.stats.rollout_staleness
        sampled = [sample for group in groups for sample in group.samples if sample.version_spans]
        ages = Counter(staleness(live, [span.policy_version for span in s.version_spans]) for s in sampled)
        with held(), self._counting:
            for age, times in ages.items():
                histogram.observe(age, times)


def log_rollout(groups: Sequence[AnyGroup], seconds: float, policy_version: int) -> None:
    """Log one line on a rollout that took `seconds`."""
    num_tokens = sum(group.num_tokens for group in groups)
    rewards = [reward for group in groups for reward in group.total_rewards]
    mean = f", mean reward {sum(rewards) / len(rewards):.4f}" if rewards else ""
    numbers = (len(groups), num_tokens, seconds, num_tokens / seconds, policy_version, mean)
    logger.info("rollout of %d prompts: %d tokens in %.2f s (%.0f tokens/s), policy version %d%s", *numbers)


def _logprob_temperature(params: Sequence[SamplingParams], over_support: bool) -> float | None:
    """Temperature of a rollout's log-probs; None if its prompts do not share one, or for those of edited logits."""
    given = {p.temperature or 1.0 if p.logprobs_mode != "raw" else 1.0 for p in params}
    if len(given) > 1 or (not over_support and any(p.logprobs_mode == "processed" for p in params)):
        return None
    return given.pop()


def _by_function(rewards: Sequence[Rewards]) -> dict[str, list[list[float | None]]]:
    """Name -> per group, one reward per sample."""
    return {name: [each.by_function[name] for each in rewards] for name in rewards[0].by_function} if rewards else {}


def _pad_token_id(frontend: Frontend) -> int:
    """The tokenizer's pad token, else its end token, else 0."""
    try:
        tokenizer = frontend.get_tokenizer()
    except LifecycleError:
        return 0
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
