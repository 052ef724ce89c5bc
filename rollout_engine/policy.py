"""The policy as a trainer sees it: it rolls out, scores, and takes new weights."""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any, Self, Unpack

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rollout_engine.batches.layout import full_places
from rollout_engine.config import EngineConfig
from rollout_engine.engine.interrupts import deliver, held
from rollout_engine.errors import ConfigError, LifecycleError
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.llm import LLM
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.verb_methods import BlockingVerbs, Face
from rollout_engine.metrics import StatLogger, staleness
from rollout_engine.provenance import RolloutNote, attach
from rollout_engine.reward_functions import RewardFunctions
from rollout_engine.rewards import Rewards
from rollout_engine.rollout_batch import Layout, check_layout, rollout_batch
from rollout_engine.rollout_plan import Columns, RolloutPlan
from rollout_engine.rollout_run import Group, RolloutRun
from rollout_engine.sampling_params import SamplingLike, SamplingParams
from rollout_engine.telemetry.progress import ProgressBar
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.prompts import check_chat_arguments
from rollout_engine.threads import no_thread

logger = logging.getLogger("rollout_engine")

_ALONE = (1, "processes", None)
"""`num_replicas`, `placement` and `ray_address` of an engine in this process."""


class RolloutPolicy(BlockingVerbs):
    """A language model that produces rollouts and follows a trainer's weights.

        policy = RolloutPolicy.from_pretrained(path)
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(path))
        for step in range(100):
            batch = policy.rollout(prompts, SamplingParams(max_tokens=64), num_samples=8, reward_fn=reward)
            advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
            logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
            ratio = (logprobs - batch["log_probs", "full"][:, 1:]).exp()
            loss = -(ratio * advantage)[batch["masks", "all_assistant_mask"][:, 1:]].mean()
            loss.backward(), optimizer.step(), optimizer.zero_grad()
            policy.update_weights(trainer)

    Several rollouts may run at once, from several threads or tasks, beside what others ask of the engine.
    """

    def __init__(self, engine: LLMEngine | LLM | AsyncLLM) -> None:
        """A policy over an engine in this process or another; `shutdown` ends the engine too."""
        if not isinstance(engine, Face):
            given = f"the path {str(engine)!r}" if isinstance(engine, str | os.PathLike) else f"{engine!r:.80}"
            raise ConfigError(
                f"RolloutPolicy takes an engine (LLM, LLMEngine or AsyncLLM), not {given}: "
                "RolloutPolicy.from_pretrained(path) makes both."
            )
        self.engine, self.frontend = engine, engine.frontend
        info = self.frontend.client.info
        self._dtype = info.dtype
        self._fp32_head = info.dtype != "float32" and info.config.fp32_head
        self._pad_token_id = _pad_token_id(self.frontend)
        self._counting = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        num_replicas: int = 1,
        placement: str = "processes",
        ray_address: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        **engine_kwargs: Any,
    ) -> Self:
        """A policy over a new engine for a checkpoint directory or hub id; options as in `EngineConfig`.

        `num_replicas`: with 2 or more, so many engines in processes of their own; `placement` and `ray_address` as for
        `AsyncLLM`.
        """
        if (num_replicas, placement, ray_address) != _ALONE:
            engine = AsyncLLM(
                model,
                num_replicas=num_replicas,
                placement=placement,
                ray_address=ray_address,
                stat_loggers=stat_loggers,
                **engine_kwargs,
            )
            return cls(engine)
        config = EngineConfig(model=model, **engine_kwargs)  # type: ignore[arg-type]  # it converts paths
        return cls(LLMEngine.from_config(config, stat_loggers=stat_loggers))

    def rollout(
        self,
        prompts: Any,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        num_samples: int | None = None,
        columns: Columns | None = None,
        reward_fn: RewardFunctions | None = None,
        reward_weights: Sequence[float] | None = None,
        seed: int | None = None,
        layout: Layout = "padded",
        use_tqdm: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> TensorDict:
        """Sample every prompt and return all sequences, group-major, with the keys of `rollout_engine.rollout_batch`.

        Args:
            prompts: one prompt or a list of them, of any kind that the engine takes: text, token ids, conversations.
            sampling_params: one for all, or one per prompt; a dict of their fields will do. Log-probs are always on.
            num_samples: samples per prompt; overrides `n`.
            columns: name -> one value per prompt. They reach the result and, repeated per sample, the reward function.
            reward_fn: `reward_fn(prompts, completions, completion_ids, **columns)` gives one number per completion, or
                None where it does not apply; called per group as it finishes, with the prompt as it was given. It gets
                those arguments that it names, as in TRL (`rollout_engine.reward_functions`). May be async. Completions
                are texts; where the prompt was a plain list of messages, they are lists of one message. A list of
                functions gives the sum, and ("rewards", NAME) for each.
            reward_weights: one number per function of that list, 1.0 unless given.
            seed: sample i of prompt p is drawn with sequence seed child_seed(mix(seed, p), i), both functions of
                `rollout_engine.seeds`; None leaves seeds to the sampling params and the engine.
            layout: "padded" or "packed".
            use_tqdm: show a progress bar; without it nothing is printed.
            chat: for conversations: `tools`, `chat_template`, `chat_template_kwargs` (for example
                {"enable_thinking": False}), `add_generation_prompt`, `continue_final_message`.

        Works inside a running event loop too (it blocks that loop). Whatever is raised, the requests of this rollout
        are aborted first and the engine lives on: `RequestError` before anything is sampled, `EngineGenerateError` as
        soon as one sequence fails (a group with a hole is no use to a trainer), `RewardError` naming the prompt.
        `LifecycleError` while paused or asleep; paused by another thread once it has begun, it waits for the resume,
        or raises `RetryableError` where that pause (sleep, update) aborts a group: none is returned cut short.
        """
        check_layout(layout)
        check_chat_arguments(chat, self.rollout)
        self.frontend.require_running("rollout")
        start, groups, num_tokens = time.perf_counter(), [], 0
        plan = RolloutPlan.of(prompts, sampling_params, num_samples, columns, seed, chat)
        bar = ProgressBar(len(plan.prompts), desc="rollout", unit="group", shown=use_tqdm)
        with held(), closing(RolloutRun(self.frontend, plan, reward_fn, reward_weights=reward_weights)) as run, bar:
            while run.unfinished:
                deliver()
                for group in run.advance():
                    groups.append(group)
                    num_tokens += group.num_tokens
                    bar.update(group.num_tokens)
                bar.count(lambda: run.num_open_tokens)
        groups.sort(key=lambda group: group.index)
        _log(groups, num_tokens, time.perf_counter() - start, self.policy_version)
        return self._batch(groups, plan, layout)

    async def arollout(
        self,
        prompts: Any,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        num_samples: int | None = None,
        columns: Columns | None = None,
        reward_fn: RewardFunctions | None = None,
        reward_weights: Sequence[float] | None = None,
        seed: int | None = None,
        layout: Layout = "padded",
        **chat: Unpack[ChatOptions],
    ) -> AsyncIterator[TensorDict]:
        """Yield what `rollout` returns, one TensorDict per group, in completion order; "group_id" names its prompt.

        The engine steps in a worker thread, so the loop stays free; async rewards run on the caller's loop. Leaving the
        iteration early aborts what is left. Nothing is queued before the first group is asked for. While paused or
        asleep it waits for another task to resume, or is turned away, by `EngineConfig.admission`. A group that an
        abort cuts short is not yielded: `RetryableError` is raised.
        """
        check_layout(layout)
        check_chat_arguments(chat, self.arollout)
        plan = RolloutPlan.of(prompts, sampling_params, num_samples, columns, seed, chat)
        loop = asyncio.get_running_loop()
        run, step = RolloutRun(self.frontend, plan, reward_fn, loop, reward_weights=reward_weights), None
        try:
            while run.unfinished:
                self.frontend.require_own_process()  # the loop's threads are not in a forked child
                try:
                    step = loop.run_in_executor(None, run.advance)
                except RuntimeError as problem:
                    raise no_thread("rollout", problem) from problem
                for group in await asyncio.shield(step):
                    yield self._batch([group], plan, layout)
        finally:
            if step is not None and not step.done():  # cancelled in mid-step: let that step end
                run.cancel_rewards()
                await asyncio.wait([step])
                step.exception()
            run.close()

    def score(self, batch: TensorDict, temperature: float = 1.0) -> Tensor:  # type: ignore[override]
        """Log-probs of a rollout's sampled tokens under the live weights: shape and mask of ("log_probs", "full").

        float32, 0 outside the mask. Equal to ("log_probs", "full") bit for bit at the temperature that sampled, as long
        as the weights are the same and the engine is deterministic.
        """
        tokens, assistant = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
        full = full_places(batch)
        sampled = [assistant[place].nonzero().flatten() for place in full]
        scored = [(place, int(at[0])) for place, at in zip(full, sampled, strict=True) if len(at)]
        ids = [tokens[place].tolist() for place, _ in scored]
        results = BlockingVerbs.score(
            self,
            [row[:first] for row, (_, first) in zip(ids, scored, strict=True)],
            [row[first:] for row, (_, first) in zip(ids, scored, strict=True)],
            temperature=temperature,
        )
        logprobs = torch.zeros(tokens.shape, dtype=torch.float32)
        for (place, first), result in zip(scored, results, strict=True):
            logprobs[place][first:] = torch.from_numpy(np.asarray(result))
        return logprobs.masked_fill_(~assistant, 0.0)

    @property
    def tokenizer(self) -> Any:
        """The engine's Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        return self.frontend.get_tokenizer()

    def _batch(self, groups: list[Group], plan: RolloutPlan, layout: Layout) -> TensorDict:
        self._count_staleness(groups)
        rewards = [group.rewards for group in groups if group.rewards is not None]
        batch = rollout_batch(
            [group.output for group in groups],
            pad_token_id=self._pad_token_id,
            group_ids=[group.index for group in groups],
            columns={name: [values[group.index] for group in groups] for name, values in plan.columns.items()},
            rewards=[each.total for each in rewards] or None,
            function_rewards=_by_function(rewards),
            layout=layout,
        )
        temperature = _logprob_temperature(plan.params)
        note = RolloutNote(self._dtype, temperature, layout == "packed", self._fp32_head)
        attach(batch["tokens", "full"], note)
        return batch

    def _count_staleness(self, groups: list[Group]) -> None:
        live, histogram = self.policy_version, self.frontend.streams.stats.rollout_staleness
        samples = [sample for group in groups for sample in group.output.outputs if sample.version_spans]
        ages = Counter(staleness(live, [span.policy_version for span in s.version_spans]) for s in samples)
        with held(), self._counting:
            for age, times in ages.items():
                histogram.observe(age, times)


def _logprob_temperature(params: Sequence[SamplingParams]) -> float | None:
    """Temperature of a rollout's log-probs; None if its prompts do not share one."""
    given = {p.temperature if p.logprobs_mode == "tempered" else 1.0 for p in params}
    if len(given) > 1 or any(p.logprobs_mode == "processed" for p in params):
        return None
    return given.pop() or 1.0


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


def _log(groups: list[Group], num_tokens: int, seconds: float, policy_version: int) -> None:
    rewards = [reward for group in groups if group.rewards for reward in group.rewards.total]
    mean = f", mean reward {sum(rewards) / len(rewards):.4f}" if rewards else ""
    numbers = (len(groups), num_tokens, seconds, num_tokens / seconds, policy_version, mean)
    logger.info("rollout of %d prompts: %d tokens in %.2f s (%.0f tokens/s), policy version %d%s", *numbers)
