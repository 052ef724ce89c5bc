"""GRPO without waiting: one process samples all the time, another trains on what it gets.

    python examples/async_grpo.py                       makes a small policy on the spot, then trains it
    python examples/async_grpo.py --shuffle-advantages  the control: same run, rewards dealt to the wrong samples
    python examples/async_grpo.py --verify              recomputes every log-prob under the weights that sampled it
    python examples/async_grpo.py --model DIRECTORY     trains a policy made before, in runs/grpo/policy for example

The engine's process keeps up to 32 prompts in flight. The trainer takes 16 groups of 8 answers, makes one step, and
sends its weights to the engine while it works on the next batch; answers in flight go on under the new weights. So a
batch is a version or more old, and several versions made some of its answers. Every token carries the log-prob that its
sampler gave it and the version of the weights, so its importance weight is exact. Groups with a token more than
`--max-staleness` versions old are dropped. While the trainer works, so are groups whose answers are all right or all
wrong, which teach nothing: later ones take their place, until a whole batch that teaches waits; then the engine rests.

The task and the made policy are those of examples/grpo.py, and imported from it.
"""

import argparse
import asyncio
import copy
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo import GROUP_SIZE, NUM_UNSEEN, Entry, Task, make_items, make_policy
from rollout_engine import AsyncLLM, EngineGenerateError, RequestOutput, SamplingParams, advantages, exact
from rollout_engine.batches.rollout_batch import rollout_batch

NUM_IN_FLIGHT, BATCH = 32, 16
MAX_WEIGHT, EVALUATE_EVERY = 2.0, 5


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    torch.set_num_threads(1)  # one core for the trainer, one for the engine
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
    limits = dict(max_num_seqs=GROUP_SIZE * NUM_IN_FLIGHT + NUM_UNSEEN, num_threads=1)
    with AsyncLLM(options.model, dtype="float32", seed=options.seed, **limits) as engine:
        history = asyncio.run(train(engine, trainer, training, unseen, options))
    print(summary(history), f"; see {options.out}", sep="")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="directory of a policy made before; default: one made on the spot")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--max-staleness", type=int, default=4, help="versions a token may be old; 0: none is")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, default=4e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-advantages", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--verify", action="store_true", help="recompute log-probs under the weights of their versions")
    parser.add_argument("--out", type=Path, default=Path("runs/async_grpo"))
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: all the time, whatever the trainer does


class Group(NamedTuple):
    """The answers to one prompt, and their rewards."""

    output: RequestOutput
    rewards: list[float]

    @property
    def oldest_version(self) -> int:
        """Of the weights that made its tokens."""
        return min(span.policy_version for sample in self.output.outputs for span in sample.version_spans)

    @property
    def is_flat(self) -> bool:
        """Whether no answer is better than another: then its advantages are 0 and teach nothing."""
        return len(set(self.rewards)) == 1


class Supply:
    """Finished groups that wait for the trainer, a batch at most. Flat ones make room first (Yu et al., 2025)."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.num_stale = self.num_surplus = 0
        self._waiting: list[Group] = []
        self._arrival, self._departure = asyncio.Event(), asyncio.Event()

    def put(self, group: Group) -> None:
        """Add a group; where there is no room, the oldest flat one is dropped, or else the oldest."""
        self._waiting.append(group)
        if len(self._waiting) > BATCH:
            del self._waiting[next((i for i, group in enumerate(self._waiting) if group.is_flat), 0)]
            self.num_surplus += 1
        self._arrival.set()

    async def need(self) -> None:
        """Return once another group can make the next batch better: it is not whole, or some of it is flat."""
        while len(self._waiting) == BATCH and not any(group.is_flat for group in self._waiting):
            self._departure.clear()
            await self._departure.wait()

    async def take(self, version: int) -> list[Group]:
        """The next batch for a trainer whose weights are `version`: no token in it is more than `max_staleness` old."""
        while True:
            fresh = [group for group in self._waiting if version - group.oldest_version <= self.max_staleness]
            self.num_stale += len(self._waiting) - len(fresh)
            is_whole = len(fresh) == BATCH
            self._waiting = [] if is_whole else fresh
            self._departure.set()
            if is_whole:
                return fresh
            self._arrival.clear()
            await self._arrival.wait()


class Sampler:
    """Has the engine answer the task's entries."""

    def __init__(self, engine: AsyncLLM, task: Task) -> None:
        self._engine, self._task = engine, task

    async def sample_forever(self, training: list[Entry], supply: Supply, draws: random.Random) -> None:
        """A group for one entry after another, while one is needed."""
        limits = dict(max_tokens=self._task.max_tokens, output_kind="final_only")
        sampling = SamplingParams(n=GROUP_SIZE, logprobs=0, **limits)
        while True:
            await supply.need()
            supply.put(await self._answer(draws.choice(training), sampling))

    async def evaluate(self, entries: list[Entry]) -> dict[str, float]:
        """The share of `entries` that greedy decoding answers right; they go ahead of what waits."""
        greedy = SamplingParams(temperature=0, max_tokens=self._task.max_tokens, output_kind="final_only")
        groups = await asyncio.gather(*(self._answer(entry, greedy, priority=-1) for entry in entries))
        return {"accuracy": sum(group.rewards[0] for group in groups) / len(groups)}

    async def _answer(self, entry: Entry, sampling: SamplingParams, priority: int = 0) -> Group:
        [prompt] = self._task.prompts([entry])
        [output] = [output async for output in self._engine.generate(prompt, sampling, priority=priority)]
        if failed := [sample.error for sample in output.outputs if sample.finish_reason == "error"]:
            raise EngineGenerateError(f"{prompt!r} was not answered: {failed[0]}")
        return Group(output, [self._task.score(sample.text, entry) for sample in output.outputs])


# ---------------------------------------------------------------------------------------------------------------------
# Training


async def train(
    engine: AsyncLLM, trainer: nn.Module, training: list[Entry], unseen: list[Entry], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns one row of metrics per step. A row's accuracy, now and then, is that before the step's update."""
    supply, draws, start = Supply(options.max_staleness), random.Random(options.seed), time.perf_counter()
    tokenizer = await engine.get_tokenizer()
    sampler, learner = Sampler(engine, Task(tokenizer)), Learner(trainer, tokenizer.pad_token_id, options)
    history: list[dict[str, Any]] = []
    with open(options.out / "metrics.jsonl", "w") as metrics:
        async with asyncio.TaskGroup() as tasks:  # whatever fails in it ends the training
            endless = [sampler.sample_forever(training, supply, draws) for _ in range(NUM_IN_FLIGHT)]
            streams = [tasks.create_task(coroutine) for coroutine in endless]
            delivery = tasks.create_task(sampler.evaluate(unseen))
            for step in range(options.steps + 1):
                began = time.perf_counter()
                groups = await supply.take(learner.version)
                row = {"step": step, "waiting_seconds": time.perf_counter() - began}
                row |= await asyncio.to_thread(learner.compute_gradient, groups)
                began = time.perf_counter()
                row |= await delivery  # only then may weights change, so an accuracy is that of one version
                row["delivery_seconds"] = time.perf_counter() - began
                learner.step()
                is_due = (step + 1) % EVALUATE_EVERY == 0 or step + 1 == options.steps
                delivery = tasks.create_task(deliver(engine, learner, sampler, unseen if is_due else []))
                row |= {"stale_groups": supply.num_stale, "surplus_groups": supply.num_surplus}
                row["seconds"] = time.perf_counter() - start
                report(row)
                metrics.write(json.dumps(row) + "\n")
                history.append(row)
            await delivery
            for stream in streams:
                stream.cancel()
    return history


async def deliver(engine: AsyncLLM, learner: "Learner", sampler: Sampler, entries: list[Entry]) -> dict[str, float]:
    """Send the weights, which must not change until this returns; then evaluate them on `entries`, if there are any."""
    await engine.update_weights(learner.model, version=learner.version)
    return await sampler.evaluate(entries) if entries else {}


class Learner:
    """The trainer's weights, their optimizer, and their version: the number of steps made."""

    def __init__(self, model: nn.Module, pad_token_id: int, options: argparse.Namespace) -> None:
        self.model, self.version, self._pad_token_id = model, 0, pad_token_id
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
        self._shuffle = options.shuffle_advantages
        self._past = PastPolicies(model, options.max_staleness) if options.verify else None

    def compute_gradient(self, groups: list[Group]) -> dict[str, Any]:
        """Of the GRPO loss; changes no weight. Returns figures of the batch."""
        start = time.perf_counter()
        outputs, rewards = zip(*groups, strict=True)
        batch = rollout_batch(outputs, pad_token_id=self._pad_token_id, rewards=rewards)
        advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
        if self._shuffle:
            advantage = advantage[torch.randperm(len(advantage))]
        # Column i belongs to token i + 1.
        sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
        new = exact.token_logprobs(self.model, batch["tokens", "full"], batch["masks", "all_attention_mask"])
        weights = importance_weights(new[sampled], old[sampled])
        loss = -(weights * advantage.expand_as(new)[sampled] * new[sampled]).mean()
        loss.backward()
        figures = {"reward": batch["next", "reward"].mean().item(), "mean_weight": weights.mean().item()} | ages(
            batch, self.version
        )
        if self._past is not None:
            figures["max_logprob_diff"] = self._past.largest_difference(batch)
        return figures | {"training_seconds": time.perf_counter() - start}

    def step(self) -> None:
        """The next version."""
        clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        if self._past is not None:
            self._past.keep(self.version, self.model)


def importance_weights(new: Tensor, old: Tensor) -> Tensor:
    """How much likelier a token is now than when it was sampled, `MAX_WEIGHT` at most (Ionides, 2008); no gradient."""
    return (new.detach() - old).exp().clamp(max=MAX_WEIGHT)


def ages(batch: TensorDict, version: int) -> dict[str, Any]:
    """How many sampled tokens are how many versions old; share of those in answers that several versions made."""
    sampled, versions = batch["masks", "all_assistant_mask"], batch["policy_version"]
    staleness = Counter((version - versions[sampled]).tolist())
    is_mixed = versions.amax(1) != versions.masked_fill(~sampled, version).amin(1)
    mixed = sampled[is_mixed].sum().item() / sampled.sum().item()
    return {"staleness": {str(age): staleness[age] for age in sorted(staleness)}, "mixed": mixed}


class PastPolicies:
    """The weights of the versions that a batch may hold, to try its log-probs on."""

    def __init__(self, model: nn.Module, max_staleness: int) -> None:
        self._model, self._num_kept = copy.deepcopy(model), max_staleness + 1
        self._weights = {0: copy.deepcopy(model.state_dict())}

    def keep(self, version: int, model: nn.Module) -> None:
        """Remember a version; forget the one that has become too old."""
        self._weights[version] = copy.deepcopy(model.state_dict())
        self._weights.pop(version - self._num_kept, None)

    @torch.no_grad()
    def largest_difference(self, batch: TensorDict) -> float:
        """Largest |log-prob of a sampled token - what its version's weights give it|, where its KV is of them too."""
        tokens, real, old = batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["log_probs", "full"]
        versions = batch["policy_version"]
        is_exact = batch["kv_min_version"] == versions  # elsewhere it went on over older KV
        largest = 0.0
        for version in versions[versions >= 0].unique().tolist():
            here = (is_exact & (versions == version))[:, 1:]
            self._model.load_state_dict(self._weights[version])
            difference = (exact.token_logprobs(self._model, tokens, real) - old[:, 1:])[here]
            largest = max([largest, *difference.abs().tolist()])
        return largest


# ---------------------------------------------------------------------------------------------------------------------
# The record


def report(row: dict[str, Any]) -> None:
    """Print one step."""
    staleness = " ".join(f"{age}:{count}" for age, count in row["staleness"].items())
    difference = f"  max |log-prob diff| {row['max_logprob_diff']}" if "max_logprob_diff" in row else ""
    print(
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row.get('accuracy', math.nan):.3f}  "
        f"tokens by age {staleness}  mixed {row['mixed']:.0%}  stale {row['stale_groups']}  "
        f"surplus {row['surplus_groups']}{difference}",
        flush=True,
    )


def summary(history: list[dict[str, Any]]) -> str:
    """What the whole run was like."""
    staleness = sum((Counter(row["staleness"]) for row in history), Counter())
    ages = ", ".join(f"{age}: {staleness[age] / staleness.total():.1%}" for age in sorted(staleness, key=int))
    mixed = sum(row["mixed"] for row in history) / len(history)
    first, last = history[0], history[-1]
    parts = {name: sum(row[f"{name}_seconds"] for row in history) for name in ("training", "waiting", "delivery")}
    shares = ", ".join(f"{name} {seconds / last['seconds']:.0%}" for name, seconds in parts.items())
    return f"""{last["seconds"]:.0f} s: {shares}
tokens by age in versions: {ages}; {mixed:.1%} in answers of mixed versions
groups: {len(history) * BATCH} trained on, {last["stale_groups"]} too old, {last["surplus_groups"]} without room
accuracy on {NUM_UNSEEN} unseen words: {first["accuracy"]:.3f} -> {last["accuracy"]:.3f}"""


if __name__ == "__main__":
    main()
