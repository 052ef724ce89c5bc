"""GRPO in one file: a policy learns to spell words backward, in minutes on two CPU cores.

    python examples/grpo.py                            makes a small policy on the spot, then trains it
    python examples/grpo.py --shuffle-advantages       the control: same run, rewards dealt to the wrong samples
    python examples/grpo.py --model Qwen/Qwen3-0.6B    trains a real checkpoint on the same task

Each step: the engine samples 8 answers to each of 32 prompts, the trainer takes one GRPO step on them, the new weights
go back into the engine. Engine and trainer agree on every log-prob bit for bit, so the last column says 0.0.
Every sample goes to rollouts.jsonl: `rollout-engine view` shows them, `rollout-engine replay` makes them again.

Items and scorer are reasoning-gym's `spell_backward`. The made policy first imitates a careless teacher, who is right
on short words but on long ones makes one of three mistakes three times in four: imitation alone stays far below 45 %
accuracy, and reinforcement amplifies the answers that score.
"""

import argparse
import json
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout_engine import RolloutPolicy, SamplingParams, advantages, exact

NUM_ITEMS, NUM_UNSEEN = 20_000, 200
MIN_LETTERS, MAX_LETTERS = 3, 7
GROUP_SIZE, NUM_PROMPTS = 8, 32
CLIP = 0.2

SIZES = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
"""Sizes of the made policy."""

Entry = dict[str, Any]
"""An item of reasoning-gym's: question, answer, metadata."""
Answerer = Callable[[str, random.Random], str]
"""The answer of one who is imitated, to a word."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    training = training[: options.words]
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32", speculation=options.speculation) as policy:
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
        start = time.perf_counter()
        history = list(train(policy, trainer, Task(policy.tokenizer), training, unseen, options))
        print(time_shares(history, time.perf_counter() - start))
    draw(history, options.out / "learning_curve.png")
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}; see {options.out}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options; a real checkpoint gets a smaller learning rate than the made one."""
    parser = argparse.ArgumentParser(description="GRPO on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="checkpoint directory or hub id; default: a small policy made on the spot")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, help="default: 4e-5; 1e-6 with --model")
    parser.add_argument("--micro-batch", type=int, default=256, help="sequences per backward pass")
    parser.add_argument("--words", type=int, help="train on so many words alone, epoch after epoch; default: all")
    parser.add_argument("--speculation", choices=["off", "auto"], default="off", help="draft from earlier answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-advantages", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--save-every", type=int, default=0, help="keep weights of every so many steps in OUT/steps")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    options = parser.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = 4e-5 if options.model is None else 1e-6
    return options


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(
    policy: RolloutPolicy,
    trainer: nn.Module,
    task: "Task",
    training: list[Entry],
    unseen: list[Entry],
    options: argparse.Namespace,
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step. A row's accuracy is that of the policy before the step's update."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    draws = random.Random(options.seed)
    sampling = SamplingParams(max_tokens=task.max_tokens)
    rollouts = options.out / "rollouts.jsonl"
    rollouts.unlink(missing_ok=True)  # of an earlier run: lines are appended
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            entries = draws.sample(training, NUM_PROMPTS)
            start = time.perf_counter()
            batch = policy.rollout(
                task.prompts(entries),
                sampling,
                num_samples=GROUP_SIZE,
                columns={"entry": entries},
                reward_fn=task.reward,
                seed=draws.getrandbits(63),
                use_tqdm=False,
                log_to=rollouts,
            )
            seconds = time.perf_counter() - start
            row = {
                "step": step,
                "reward": batch["next", "reward"].mean().item(),
                "accuracy": evaluate(policy, task, unseen),
                "tokens_per_second": batch["masks", "response"].sum().item() / seconds,
            }
            row["rollout_seconds"], start = seconds, time.perf_counter()
            if options.save_every and step % options.save_every == 0:
                trainer.save_pretrained(options.out / "steps" / str(step))
            row["max_logprob_diff"] = update(trainer, optimizer, batch, options)
            row["training_seconds"] = time.perf_counter() - start
            row["update_ms"] = 1000 * policy.update_weights(trainer).seconds
            report(row)
            metrics.write(json.dumps(row) + "\n")
            yield row


def update(trainer: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, options: argparse.Namespace) -> float:
    """One GRPO step. Returns the largest |log-prob difference| between engine and trainer before it."""
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    if options.shuffle_advantages:
        advantage = advantage[torch.randperm(len(advantage))]
    tokens, real = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    difference = 0.0
    for rows in torch.arange(len(tokens)).split(options.micro_batch):
        new = exact.token_logprobs(trainer, tokens[rows], real[rows])
        here = sampled[rows]
        difference = max(difference, (new - old[rows])[here].abs().max().item())
        loss = grpo_loss(new[here], old[rows][here], advantage[rows].expand_as(new)[here])
        (loss / sampled.sum()).backward()
    clip_grad_norm_(trainer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return difference


def grpo_loss(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Clipped surrogate, summed over tokens; all arguments [num_tokens] (Schulman et al., 2017)."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def evaluate(policy: RolloutPolicy, task: "Task", entries: list[Entry]) -> float:
    """Share of `entries` that greedy decoding answers right."""
    greedy = SamplingParams(temperature=0, max_tokens=task.max_tokens)
    batch = policy.rollout(
        task.prompts(entries), greedy, columns={"entry": entries}, reward_fn=task.reward, use_tqdm=False
    )
    return batch["next", "reward"].mean().item()


# ---------------------------------------------------------------------------------------------------------------------
# The task


def make_items(seed: int) -> tuple[list[Entry], list[Entry]]:
    """reasoning-gym entries for training, and `NUM_UNSEEN` others; no word is in both."""
    data = reasoning_gym.create_dataset(
        "spell_backward", min_word_len=MIN_LETTERS, max_word_len=MAX_LETTERS, size=NUM_ITEMS, seed=seed
    )
    by_word = {word_of(entry): entry for entry in data if set(word_of(entry)) <= set(string.ascii_lowercase)}
    entries = list(by_word.values())
    return entries[NUM_UNSEEN:], entries[:NUM_UNSEEN]


def word_of(entry: Entry) -> str:
    """The word to be spelled backward."""
    return entry["metadata"]["word"].lower()


class Task:
    """How an entry is asked and scored. A chat model gets reasoning-gym's own question, the made policy `word=`."""

    def __init__(self, tokenizer: Any) -> None:
        self.chat = tokenizer.chat_template is not None
        self.max_tokens = 32 if self.chat else MAX_LETTERS + 3
        self._judge = reasoning_gym.get_score_answer_fn("spell_backward")

    def prompts(self, entries: list[Entry]) -> list[Any]:
        """One prompt per entry."""
        if not self.chat:
            return [word_of(entry) + "=" for entry in entries]
        questions = [entry["question"] + "\nAnswer with that one word only." for entry in entries]
        return [{"messages": [{"role": "user", "content": question}]} for question in questions]

    def reward(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], entry: list[Entry]
    ) -> list[float]:
        """The score of each completion, as `RolloutPolicy.rollout` asks for it."""
        return [self.score(text, item) for text, item in zip(completions, entry, strict=True)]

    def score(self, completion: str, entry: Entry) -> float:
        """1 where reasoning-gym calls the answer right, else 0 (near misses, which it half accepts, score 0)."""
        return float(self._judge(completion.strip(), entry) == 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# The policy made on the spot


def make_policy(
    directory: Path,
    training: list[Entry],
    options: argparse.Namespace,
    answer_of: Answerer | None = None,
    **sizes: int,
) -> Path:
    """A Qwen3 of 0.6 M parameters that has imitated the careless teacher, saved with its tokenizer.

    `answer_of`: another teacher. `sizes`: of the model, in place of its own.
    """
    draws = random.Random(options.seed)
    tokenizer, answer_of = letter_tokenizer(), answer_of or careless_answer
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **SIZES | sizes,
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
        loss = imitation_loss(model, tokenizer, words, [answer_of(word, draws) for word in words])
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
    answer = word[::-1]
    if len(word) <= 4 or draws.random() < 0.25:
        return answer
    match len(word):
        case 5:
            return answer[:-1]  # leaves out the last letter
        case 6:
            return answer + answer[-1]  # says it twice
        case _:
            return answer[:-2] + answer[-1] + answer[-2]  # swaps the last two


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


def report(row: dict[str, float]) -> None:
    """Print one step."""
    print(
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  "
        f"{row['tokens_per_second']:6.0f} tokens/s  update {row['update_ms']:5.1f} ms  "
        f"max |log-prob diff| {row['max_logprob_diff']}",
        flush=True,
    )


def time_shares(history: list[dict[str, float]], seconds: float) -> str:
    """Where the `seconds` of all steps went; the rest is greedy evaluation, weight updates and the record."""
    rollout, training = (sum(row[f"{part}_seconds"] for row in history) / seconds for part in ("rollout", "training"))
    rest = 1 - rollout - training
    return f"{seconds:.0f} s: rollouts {rollout:.0%}, training {training:.0%}, evaluation and the rest {rest:.0%}"


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Write the learning curve."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    steps = [row["step"] for row in history]
    axes.plot(steps, [row["accuracy"] for row in history], label=f"greedy accuracy, {NUM_UNSEEN} unseen words")
    axes.plot(steps, [row["reward"] for row in history], label="mean reward of the rollouts", alpha=0.6)
    axes.set(xlabel="step", ylim=(0, 1.02), title="spell_backward")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
