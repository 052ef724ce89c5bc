"""GRPO without waiting, in one file: one process samples all the time, another trains on what it gets.

    python examples/async_grpo.py                       makes a small policy on the spot, then trains it
    python examples/async_grpo.py --shuffle-advantages  the control: same run, rewards dealt to the wrong samples
    python examples/async_grpo.py --verify              recomputes every log-prob under the weights that sampled it
    python examples/async_grpo.py --model DIRECTORY     trains the policy that examples/grpo.py or this file made

The engine's process keeps 32 prompts in flight. The trainer takes 16 groups of 8 answers, makes one step, and sends its
weights to the engine while it works on the next batch; answers in flight go on under the new weights. So a batch is a
version or more old, and several versions made some of its answers. Every token carries the log-prob that its sampler
gave it and the version of the weights, so its importance weight is exact. Groups with a token more than
`--max-staleness` versions old are dropped, and so is what has no room while the trainer works: first the groups whose
answers are all right or all wrong, which teach nothing. The task is that of examples/grpo.py.
"""

import argparse
import asyncio
import copy
import json
import math
import random
import string
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import reasoning_gym
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout_engine import AsyncLLM, EngineGenerateError, RequestOutput, SamplingParams, exact
from rollout_engine.rollout_batch import rollout_batch

NUM_ITEMS, NUM_UNSEEN = 20_000, 200
MIN_LETTERS, MAX_LETTERS = 3, 7
GROUP_SIZE, NUM_IN_FLIGHT, BATCH = 8, 32, 16
MAX_WEIGHT, EVALUATE_EVERY = 2.0, 5
SHAPE = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SCORE = reasoning_gym.get_score_answer_fn("spell_backward")

Entry = dict[str, Any]


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
        self._arrival = asyncio.Event()

    def put(self, group: Group) -> None:
        """Add a group; where there is no room, the oldest flat one is dropped, or else the oldest."""
        self._waiting.append(group)
        if len(self._waiting) > BATCH:
            del self._waiting[next((i for i, group in enumerate(self._waiting) if group.is_flat), 0)]
            self.num_surplus += 1
        self._arrival.set()

    async def take(self, version: int) -> list[Group]:
        """The next batch for a trainer whose weights are `version`: no token in it is more than `max_staleness` old."""
        while True:
            fresh = [group for group in self._waiting if version - group.oldest_version <= self.max_staleness]
            self.num_stale += len(self._waiting) - len(fresh)
            self._waiting = fresh
            if len(fresh) == BATCH:
                self._waiting = []
                return fresh
            self._arrival.clear()
            await self._arrival.wait()


async def sample_forever(engine: AsyncLLM, training: list[Entry], supply: Supply, draws: random.Random) -> None:
    """Answer one entry after another."""
    sampling = SamplingParams(n=GROUP_SIZE, max_tokens=MAX_LETTERS + 3, logprobs=0, output_kind="final_only")
    while True:
        supply.put(await answer(engine, draws.choice(training), sampling))


async def answer(engine: AsyncLLM, entry: Entry, sampling: SamplingParams, priority: int = 0) -> Group:
    """The answers to one entry, scored."""
    [output] = [output async for output in engine.generate(word_of(entry) + "=", sampling, priority=priority)]
    if failed := [sample.error for sample in output.outputs if sample.finish_reason == "error"]:
        raise EngineGenerateError(f"'{word_of(entry)}' was not answered: {failed[0]}")
    return Group(output, [reward(sample.text, entry) for sample in output.outputs])


async def evaluate(engine: AsyncLLM, entries: list[Entry]) -> dict[str, float]:
    """The share of `entries` that greedy decoding answers right; they go ahead of what waits."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_LETTERS + 3, output_kind="final_only")
    groups = await asyncio.gather(*(answer(engine, entry, greedy, priority=-1) for entry in entries))
    return {"accuracy": sum(group.rewards[0] for group in groups) / len(groups)}


# ---------------------------------------------------------------------------------------------------------------------
# Training


async def train(
    engine: AsyncLLM, trainer: nn.Module, training: list[Entry], unseen: list[Entry], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns one row of metrics per step. A row's accuracy, now and then, is that before the step's update."""
    supply, draws, start = Supply(options.max_staleness), random.Random(options.seed), time.perf_counter()
    learner = Learner(trainer, (await engine.get_tokenizer()).pad_token_id, options)
    history: list[dict[str, Any]] = []
    with open(options.out / "metrics.jsonl", "w") as metrics:
        async with asyncio.TaskGroup() as tasks:  # whatever fails in it ends the training
            endless = [sample_forever(engine, training, supply, draws) for _ in range(NUM_IN_FLIGHT)]
            samplers = [tasks.create_task(coroutine) for coroutine in endless]
            delivery = tasks.create_task(evaluate(engine, unseen))
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
                delivery = tasks.create_task(deliver(engine, learner, unseen if is_due else []))
                row |= {"stale_groups": supply.num_stale, "surplus_groups": supply.num_surplus}
                row["seconds"] = time.perf_counter() - start
                report(row)
                metrics.write(json.dumps(row) + "\n")
                history.append(row)
            await delivery
            for sampler in samplers:
                sampler.cancel()
    return history


async def deliver(engine: AsyncLLM, learner: "Learner", entries: list[Entry]) -> dict[str, float]:
    """Send the weights, which must not change until this returns; then evaluate them on `entries`, if there are any."""
    await engine.update_weights(learner.model, version=learner.version)
    return await evaluate(engine, entries) if entries else {}


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
        rewards = torch.tensor([group.rewards for group in groups])
        batch = rollout_batch([group.output for group in groups], pad_token_id=self._pad_token_id)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()  # Shao et al., 2024
        if self._shuffle:
            advantages = advantages[torch.randperm(len(advantages))]
        # Column i belongs to token i + 1.
        sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
        new = exact.token_logprobs(self.model, batch["tokens", "full"], batch["masks", "all_attention_mask"])
        weights = importance_weights(new[sampled], old[sampled])
        loss = -(weights * advantages[:, None].expand_as(new)[sampled] * new[sampled]).mean()
        loss.backward()
        figures = {"reward": rewards.mean().item(), "mean_weight": weights.mean().item()} | ages(batch, self.version)
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
# The task, and the policy made on the spot


def make_items(seed: int) -> tuple[list[Entry], list[Entry]]:
    """reasoning-gym entries for training, and `NUM_UNSEEN` others; no word is in both."""
    data = reasoning_gym.create_dataset(
        "spell_backward", min_word_len=MIN_LETTERS, max_word_len=MAX_LETTERS, size=NUM_ITEMS, seed=seed
    )
    by_word = {word_of(entry): entry for entry in data if set(word_of(entry)) <= set(string.ascii_lowercase)}
    entries = list(by_word.values())
    return entries[NUM_UNSEEN:], entries[:NUM_UNSEEN]


def word_of(entry: Entry) -> str:
    return entry["metadata"]["word"].lower()


def reward(answered: str, entry: Entry) -> float:
    """1 where reasoning-gym calls the answer right, else 0 (near misses, which it half accepts, score 0)."""
    return float(SCORE(answered.strip(), entry) == 1.0)


def make_policy(directory: Path, training: list[Entry], options: argparse.Namespace) -> Path:
    """A Qwen3 of 0.6 M parameters that has imitated the careless teacher, saved with its tokenizer."""
    draws = random.Random(options.seed)
    tokenizer = letter_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.warm_up_steps)
    for step in range(1, options.warm_up_steps + 1):
        words = [word_of(entry) for entry in draws.choices(training, k=128)]
        loss = imitation_loss(model, tokenizer, words, [careless_answer(word, draws) for word in words])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % 100 == 0:
            print(f"imitation {step:4d}/{options.warm_up_steps}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def careless_answer(word: str, draws: random.Random) -> str:
    """Right on words of up to four letters. On longer ones right one time in four; else each length has its mistake."""
    right = word[::-1]
    if len(word) <= 4 or draws.random() < 0.25:
        return right
    # Leaves out the last letter, or says it twice, or swaps the last two.
    return {5: right[:-1], 6: right + right[-1], 7: right[:-2] + right[-1] + right[-2]}[len(word)]


def imitation_loss(model: nn.Module, tokenizer: Any, words: list[str], answers: list[str]) -> Tensor:
    """Cross-entropy of the answers' tokens, end token included."""
    texts = [f"{word}={answer}{tokenizer.eos_token}" for word, answer in zip(words, answers, strict=True)]
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    tokens, mask = encoded["input_ids"], encoded["attention_mask"]
    position = torch.arange(tokens.shape[1])
    prompt_length = torch.tensor([len(word) + 1 for word in words])[:, None]
    labels = tokens.masked_fill((mask == 0) | (position < prompt_length), -100)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, `=`, and an end token."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "=", *string.ascii_lowercase])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


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
