"""PPO in one file: a policy and its critic learn to spell words backward, in minutes on two CPU cores.

    python examples/ppo.py                       makes a small policy on the spot, then trains it
    python examples/ppo.py --shuffle-rewards     the control: same run, every reward dealt to another answer
    python examples/ppo.py --model DIRECTORY     trains the policy that examples/grpo.py or this file made

Each step: the engine samples one answer to each of 256 prompts; the critic, a value head on the trainer's hidden
states, says what it expected after every token; the trainer takes eight clipped steps (Schulman et al., 2017) on the
advantages (GAE, Schulman et al., 2016); the new weights go back into the engine. Engine and trainer agree on every
log-prob bit for bit, so before the first of the eight every ratio is exactly 1.0, and the last column says 0.0.

The task is that of examples/grpo.py: reasoning-gym's `spell_backward`, and a made policy that first imitates a teacher
who is right on short words, but wrong three times in four on long ones.
"""

import argparse
import json
import random
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout_engine import RolloutPolicy, SamplingParams, exact

NUM_ITEMS, NUM_UNSEEN = 20_000, 200
MIN_LETTERS, MAX_LETTERS = 3, 7
NUM_PROMPTS = 256
NUM_EPOCHS, MINIBATCH = 2, 64
GAMMA, LAMBDA = 1.0, 0.95
CLIP = 0.2

Entry = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    with RolloutPolicy.from_pretrained(str(options.model), dtype="float32") as policy:
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
        history = list(train(policy, trainer, training, unseen, options))
    draw(history, options.out / "learning_curve.png")
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}; see {options.out}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="PPO on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="directory of a policy made before; default: one made on the spot")
    parser.add_argument("--steps", type=int, default=30, help="PPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of the policy")
    parser.add_argument("--value-learning-rate", type=float, default=1e-3, help="of the critic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--out", type=Path, default=Path("runs/ppo"))
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(
    policy: RolloutPolicy, trainer: nn.Module, training: list[Entry], unseen: list[Entry], options: argparse.Namespace
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step. A row's accuracy is that of the policy before the step's update."""
    critic = make_critic(trainer.config.hidden_size)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    value_optimizer = torch.optim.AdamW(critic.parameters(), lr=options.value_learning_rate, weight_decay=0.0)
    draws = random.Random(options.seed)
    sampling = SamplingParams(max_tokens=MAX_LETTERS + 3)
    greedy = SamplingParams(max_tokens=MAX_LETTERS + 3, temperature=0)
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            start = time.perf_counter()
            batch = answer(policy, draws.sample(training, NUM_PROMPTS), sampling, seed=draws.getrandbits(63))
            rollout_seconds = time.perf_counter() - start
            row = {
                "step": step,
                "reward": batch["next", "reward"].mean().item(),
                "accuracy": answer(policy, unseen, greedy)["next", "reward"].mean().item(),
                "tokens_per_second": batch["masks", "response"].sum().item() / rollout_seconds,
            }
            start = time.perf_counter()
            row |= update(trainer, critic, optimizer, value_optimizer, batch, options)
            row["training_seconds"] = time.perf_counter() - start
            row["update_ms"] = 1000 * policy.update_weights(trainer).seconds
            report(row)
            metrics.write(json.dumps(row) + "\n")
            yield row


def answer(
    policy: RolloutPolicy, entries: list[Entry], sampling: SamplingParams, seed: int | None = None
) -> TensorDict:
    """One answer to each entry, with its reward."""
    prompts = [word_of(entry) + "=" for entry in entries]
    return policy.rollout(
        prompts, sampling, num_samples=1, columns={"entry": entries}, reward_fn=reward, seed=seed, use_tqdm=False
    )


def update(
    trainer: nn.Module,
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    value_optimizer: torch.optim.Optimizer,
    batch: TensorDict,
    options: argparse.Namespace,
) -> dict[str, float]:
    """One PPO step: `NUM_EPOCHS` passes over the batch in minibatches. Returns its figures."""
    tokens, real = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    # Column i belongs to token i + 1: sampled from, and valued at, hidden state i.
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    rewards = batch["next", "reward"].squeeze(1)
    if options.shuffle_rewards:
        rewards = rewards[torch.randperm(len(rewards))]
    with torch.no_grad():
        hidden = trainer.base_model(input_ids=tokens, attention_mask=real, use_cache=False).last_hidden_state[:, :-1]
        values = critic(hidden).squeeze(-1) * sampled
    advantages = generalized_advantages(rewards, values, sampled)
    returns = advantages + values
    mean, std = advantages[sampled].mean(), advantages[sampled].std()
    advantages = (advantages - mean) / (std + 1e-6)
    figures: dict[str, float] = {}
    for _ in range(NUM_EPOCHS):
        for rows in torch.randperm(len(tokens)).split(MINIBATCH):
            here = sampled[rows]
            new = exact.token_logprobs(trainer, tokens[rows], real[rows])[here]
            ratio = (new - old[rows][here]).exp()
            figures.setdefault("max_logprob_diff", (new - old[rows][here]).abs().max().item())  # before any step
            step_on(optimizer, trainer, clipped_loss(ratio, advantages[rows][here]))
            step_on(value_optimizer, critic, mse_loss(critic(hidden[rows]).squeeze(-1)[here], returns[rows][here]))
    moved = ratio.detach()  # of the last minibatch: how far the step went from the policy that sampled
    return figures | {
        "kl": (moved - 1 - moved.log()).mean().item(),
        "clipped": ((moved - 1).abs() > CLIP).float().mean().item(),
        "entropy": -old[sampled].mean().item(),
        "explained_variance": 1 - ((returns - values)[sampled].var() / (returns[sampled].var() + 1e-6)).item(),
    }


def generalized_advantages(rewards: Tensor, values: Tensor, sampled: Tensor) -> Tensor:
    """Rewards [B] at the last sampled token, values and mask [B, T] -> advantages [B, T], 0 outside the mask (GAE)."""
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(rewards)  # advantage of the token after
    value_after, reward = torch.zeros_like(rewards), rewards
    for i in reversed(range(values.shape[1])):
        here = sampled[:, i]
        delta = reward + GAMMA * value_after - values[:, i]
        advantages[:, i] = torch.where(here, delta + GAMMA * LAMBDA * following, 0)
        following = torch.where(here, advantages[:, i], following)
        value_after = torch.where(here, values[:, i], value_after)
        reward = torch.where(here, 0, reward)  # paid
    return advantages


def clipped_loss(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Clipped surrogate, mean over tokens; both arguments [num_tokens]."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def step_on(optimizer: torch.optim.Optimizer, module: nn.Module, loss: Tensor) -> None:
    """One optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def make_critic(hidden_size: int) -> nn.Module:
    """Hidden state [..., hidden_size] -> expected reward [..., 1]; 0 at first."""
    last = nn.Linear(hidden_size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.Tanh(), last)


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


def reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], entry: list[Entry]
) -> list[float]:
    """1 where reasoning-gym calls the answer right, else 0 (near misses, which it half accepts, score 0)."""
    score = reasoning_gym.get_score_answer_fn("spell_backward")
    return [float(score(text.strip(), item) == 1.0) for text, item in zip(completions, entry, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The policy made on the spot


def make_policy(directory: Path, training: list[Entry], options: argparse.Namespace) -> Path:
    """A Qwen3 of 0.6 M parameters that has imitated the careless teacher, saved with its tokenizer."""
    draws = random.Random(options.seed)
    tokenizer = letter_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        step_on(optimizer, model, loss)
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
    match len(word):
        case 5:
            return right[:-1]  # leaves out the last letter
        case 6:
            return right + right[-1]  # says it twice
        case _:
            return right[:-2] + right[-1] + right[-2]  # swaps the last two


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
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  kl {row['kl']:.4f}  "
        f"entropy {row['entropy']:.3f}  explained {row['explained_variance']:5.2f}  "
        f"{row['tokens_per_second']:6.0f} tokens/s  max |log-prob diff| {row['max_logprob_diff']}",
        flush=True,
    )


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Write the learning curve."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    steps = [row["step"] for row in history]
    axes.plot(steps, [row["accuracy"] for row in history], label=f"greedy accuracy, {NUM_UNSEEN} unseen words")
    axes.plot(steps, [row["reward"] for row in history], label="mean reward of the rollouts", alpha=0.6)
    axes.set(xlabel="PPO step", ylim=(0, 1.02), title="spell_backward")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
