"""TRL's `GRPOTrainer` with completions of this engine.

    policy = RolloutPolicy.from_pretrained(path, dtype="float32")
    trainer = GRPOTrainer(model, reward, args, dataset, rollout_func=make_rollout_func(policy))

`make_rollout_func` uses TRL's documented hook. `attach(trainer, policy)` takes vLLM's place instead, so that TRL also
corrects for, and logs, differences between the engine's log-probs and the trainer's. Either way the trainer's weights
are pushed into the engine once per optimizer step, and prompts, rewards, loss and logs remain TRL's.

Conversations may have images, if the engine's model takes pictures. Give the trainer a processor whose image processor
is that of Pillow (`backend="pil"`), as the engine's is: the one of torchvision rounds otherwise.

`ExactLogprobs` makes those differences 0.0. `AsyncGRPOTrainer(weight_transfer=PolicyWeightTransfer(policy))` pushes
weights between steps of an engine that continues to generate.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from transformers import TrainerCallback

from envs_adapters.trainers.trl_exact import ExactLogprobs
from envs_adapters.trainers.trl_pictures import group_prompts
from envs_adapters.trainers.trl_settings import TRL, require, require_use, sampling_params
from envs_adapters.trainers.trl_weights import PolicyWeightTransfer, StoreWeightTransfer
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.rollouts.policy import RolloutPolicy

logger = logging.getLogger("rollout_engine")

__all__ = [
    "ExactLogprobs",
    "PolicyGeneration",
    "PolicyWeightTransfer",
    "StoreWeightTransfer",
    "attach",
    "make_rollout_func",
]

_TRAINER = (
    "accelerator add_callback args eos_token_ids is_deepspeed_enabled is_fsdp_enabled max_completion_length min_p "
    "model repetition_penalty state temperature top_k top_p _tokenize_prompts"
).split()
"""Attributes of a trainer that are read here."""
_SWITCHES = ("use_vllm", "vllm_mode", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
_CALLS = ("use_vllm", "_last_loaded_step", "vllm_generation", "sync_weights", "generate")
"""Names that TRL's own generation uses if vLLM is on."""


def make_rollout_func(policy: RolloutPolicy) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for `GRPOTrainer`: completions by `policy` under the trainer's weights and sampling settings.

    It returns `prompt_ids`, `completion_ids`, `logprobs` and `policy_version`, one list or number per prompt; reward
    functions that take `policy_version` get it. TRL does not correct for differing log-probs with a `rollout_func`
    alone; `attach` the trainer as well to have that. Raises `ConfigError` when called with a trainer whose settings
    cannot be honoured, and whatever `RolloutPolicy.rollout` and `update_weights` raise.
    """
    TRL.check()
    made: list[PolicyGeneration] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        attached = getattr(trainer, "vllm_generation", None)
        if isinstance(attached, PolicyGeneration) and attached.policy is policy:
            generation = attached
        elif made and made[0].trainer is trainer:
            generation = made[0]
        else:
            generation = PolicyGeneration(trainer, policy)
            made[:] = [generation]
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        completions = generation.complete(prompt_ids, images)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.token_ids for each in completions],
            "logprobs": [each.logprobs for each in completions],
            "policy_version": [each.policy_version for each in completions],
        }

    return rollout_func


def attach(trainer: Any, policy: RolloutPolicy) -> "PolicyGeneration":
    """Let `trainer`, a `GRPOTrainer` made with use_vllm=False, generate by `policy` as it would by vLLM.

    TRL then computes its importance-sampling correction with the engine's log-probs and logs
    `sampling/sampling_logp_difference`. It relies on attributes that TRL does not document: `ConfigError` names those
    that are missing, and the version that has them. Returns the object that TRL calls.
    """
    TRL.check()
    require(trainer, _SWITCHES)
    require_use(trainer._generate_single_turn, _CALLS)
    if trainer.use_vllm:
        raise ConfigError(
            "attach expects a trainer without vLLM, and this one has GRPOConfig(use_vllm=True). Leave that out: the "
            "policy takes its place."
        )
    generation = PolicyGeneration(trainer, policy)
    trainer.vllm_generation = generation
    trainer.vllm_mode = "server"
    trainer._last_loaded_step = -1
    trainer.use_vllm = True
    return generation


class Completion(NamedTuple):
    """One completion of a prompt."""

    token_ids: list[int]
    """Sampled ids, end id included."""
    logprobs: list[float]
    """One per token."""
    policy_version: int
    """Version of the weights that sampled its last token."""


_NO_ANSWER = Completion([], [], -1)


class PolicyGeneration:
    """The generations of one trainer by one policy, as TRL calls them (`trainer.vllm_generation`).

    Seeds are functions of `args.seed`, the process, the optimizer step and the number of the call within that step:
    a run can be repeated, also from a checkpoint, and no two calls draw the same.
    """

    def __init__(self, trainer: Any, policy: RolloutPolicy) -> None:
        """Raises `ConfigError` for a trainer that lacks attributes read here, or with settings that cannot be met."""
        require(trainer, _TRAINER)
        self.trainer, self.policy = trainer, policy
        self._params = sampling_params(trainer)
        self._trainings = _Trainings()
        trainer.add_callback(self._trainings)
        self._pushed: tuple[int, ...] | None = None
        self._calls_of_step = (-1, 0)
        for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
            if getattr(trainer, name):
                raise ConfigError(
                    f"This trainer has {name}=True: its processes hold parts of the weights, and this adapter pushes "
                    "whole ones, from each process to an engine of its own. Train without sharding."
                )

    def sync_weights(self) -> None:
        """Push the trainer's weights into the engine unless it has them: wholly, or not at all with an error."""
        state = self._weights_state()
        if state != self._pushed:
            self.policy.update_weights(self.trainer.accelerator.unwrap_model(self.trainer.model))
            self._pushed = state

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion of each of `prompts`, token ids in which each prompt occurs `num_generations` times in a row.

        A completion has at most as many tokens as fit behind its prompt: TRL's tool loop asks for
        `max_completion_length` of them behind the result of a tool, and cuts off the excess. If that result
        leaves no room at all (`num_generations=1`), the completion is empty, with a warning.

        Returns prompt ids and completion ids, one list per prompt, then the log-prob and the id of each sampled token,
        each in a list of its own, while vLLM would also put those of other tokens.
        """
        with profiler or nullcontext():
            fit = [i for i, each in enumerate(prompts) if num_generations > 1 or len(each) < self._max_model_len]
            shown = None if images is None else [images[i] for i in fit]
            made = iter(self.complete([prompts[i] for i in fit], shown, shortens=True) if fit else ())
            completions = [next(made) if len(prompt) < self._max_model_len else _NO_ANSWER for prompt in prompts]
        if len(fit) < len(prompts):
            what = "%d of %d prompts with a tool's result fill max_model_len=%d: their answers are empty."
            logger.warning(what, len(prompts) - len(fit), len(prompts), self._max_model_len)
        return (
            prompts,
            [each.token_ids for each in completions],
            [[[logprob] for logprob in each.logprobs] for each in completions],
            [[[token] for token in each.token_ids] for each in completions],
        )

    def complete(
        self,
        prompts: Sequence[list[int]],
        images: Sequence[list[Any] | None] | None = None,
        *,
        shortens: bool = False,
    ) -> list[Completion]:
        """One completion of each prompt; equal prompts in a row are one group, whose prompt is computed once.

        `images`: of each prompt, whose placeholders are expanded. `shortens`: a completion may have fewer tokens than
        the trainer asks for if no more fit behind its prompt.
        """
        self.sync_weights()
        groups = group_prompts(prompts, images)
        batch = self.policy.rollout(
            [prompt for prompt, _ in groups],
            [self._params_of(prompt["prompt_token_ids"], shortens).clone(n=size) for prompt, size in groups],
            seed=self._next_seed(),
            use_tqdm=False,
        )
        lengths = batch["masks", "response"].sum(1).tolist()
        rows = zip(
            lengths,
            batch["tokens", "response"].tolist(),
            batch["log_probs", "response"].tolist(),
            batch["policy_version"].amax(1).tolist(),
            strict=True,
        )
        return [Completion(tokens[:n], logprobs[:n], version) for n, tokens, logprobs, version in rows]

    @property
    def _max_model_len(self) -> int:
        return self.policy.frontend.client.info.max_model_len

    def _params_of(self, prompt: list[int], shortens: bool) -> SamplingParams:
        room = self._max_model_len - len(prompt)
        if not shortens or room < 1 or (self._params.max_tokens or 0) <= room:
            return self._params
        return self._params.clone(max_tokens=room, min_tokens=min(self._params.min_tokens, room))

    def _next_seed(self) -> int:
        step = self.trainer.state.global_step
        number = self._calls_of_step[1] + 1 if self._calls_of_step[0] == step else 0
        self._calls_of_step = (step, number)
        seed = mix(self.trainer.args.seed, self.trainer.accelerator.process_index)
        return mix(mix(seed, step), number)

    def _weights_state(self) -> tuple[int, ...]:
        """Numbers that change with every optimizer step and training, and with most other writes, such as loading."""
        writes = sum(parameter._version for parameter in self.trainer.model.parameters())  # fused optimizers add none
        return self._trainings.count, self.trainer.state.global_step, writes


class _Trainings(TrainerCallback):
    """Counts the trainings of a trainer, each of which begins at step 0 anew."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.count += 1
