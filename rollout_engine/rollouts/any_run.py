"""The arguments that `rollout` and `arollout` share, and the run that they begin: over prompts or environments."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.sampling_params import SamplingLike
from rollout_engine.batches.reward_functions import RewardFunctions
from rollout_engine.batches.rollout_batch import Layout, check_layout
from rollout_engine.engine.interrupts import deliver, held
from rollout_engine.faces.frontend import Frontend
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.plan import (
    EPISODE_KEYS,
    EpisodePlan,
    RolloutOptions,
    divided,
    refuse_beside_env,
    refuse_environments,
)
from rollout_engine.rollouts.episodes.run import EpisodeRun
from rollout_engine.rollouts.plan import Columns, RolloutPlan
from rollout_engine.rollouts.run import RolloutRun
from rollout_engine.telemetry.progress import ProgressBar
from rollout_engine.text.conversations import CHAT_KEYS, ChatOptions
from rollout_engine.text.prompts import check_chat_arguments


class RolloutArguments(NamedTuple):
    """Arguments as they were given."""

    prompts: Any
    params: SamplingLike | Sequence[SamplingLike] | None
    num_samples: int | None
    columns: Columns | None
    reward_fn: RewardFunctions | None
    reward_weights: Sequence[float] | None
    seed: int | None
    layout: Layout
    oversample: int | None
    session_id: str | Sequence[str | None] | None
    lora_request: LoRALike | None
    options: RolloutOptions

    def begin(
        self,
        frontend: Frontend,
        kept_workers: KeptWorkers,
        verb: Callable[..., Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> RolloutRun | EpisodeRun:
        """Check them and make the run. `loop` runs async rewards. Raises `RequestError`, naming those of `verb`."""
        check_layout(self.layout)
        check_chat_arguments(self.options, verb, [*CHAT_KEYS, *EPISODE_KEYS])
        chat, episodes = divided(self.options)
        frontend.ensure_loras(self.lora_request)
        if episodes:
            refuse_beside_env(
                prompts=self.prompts,
                columns=self.columns,
                reward_fn=self.reward_fn,
                reward_weights=self.reward_weights,
                oversample=self.oversample,
                session_id=self.session_id,
            )
            plan = EpisodePlan.of(frontend, self.params, self.num_samples, self.seed, chat, episodes)
            lora = None if self.lora_request is None else as_lora_request(self.lora_request).name
            return EpisodeRun(frontend, msgspec.structs.replace(plan, lora=lora), kept_workers)
        if self.prompts is None:
            raise RequestError("prompts=None needs env=, whose environments give the prompts.", field="prompts")
        prompts = RolloutPlan.of(
            self.prompts,
            self.params,
            self.num_samples,
            self.columns,
            self.seed,
            chat,
            self.oversample,
            self.session_id,
            self.lora_request,
        )
        return RolloutRun(frontend, prompts.tasks(), self.reward_fn, loop, reward_weights=self.reward_weights)


def check_for_prompts(verb: Callable[..., Any], layout: Layout, options: ChatOptions) -> None:
    """Raise `RequestError` where a verb that plays no environments does not take these."""
    check_layout(layout)
    refuse_environments(verb.__name__, options)
    check_chat_arguments(options, verb)


def run_to_end(run: RolloutRun | EpisodeRun, tell: Callable[[Any], None], *, shown: bool) -> list[Any]:
    """Run all groups to their end, with a progress bar if it is `shown`. Returns them in the order of their prompts."""
    groups, bar = [], ProgressBar(run.num_groups, desc="rollout", unit="group", shown=shown)
    with held(), closing(run), bar:
        while run.unfinished:
            deliver()
            for group in run.advance():
                groups.append(group)
                bar.update(group.num_tokens)
                tell(group)
            bar.count(lambda: run.num_open_tokens)
    return sorted(groups, key=lambda group: group.index)
