"""Shared by the examples that train in environments: a small model, imitation of demonstrations, GRPO, the record."""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo import update
from rollout_engine import RolloutPolicy, SamplingParams, exact, to_jsonl

CHAT = (
    "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GROUP_SIZE, NUM_STARTS, NUM_UNSEEN = 8, 32, 200
UNSEEN_SEED = 1_000_003

Row = dict[str, float]
Demonstration = list[tuple[str, bool]]
"""Pieces of text, and whether the policy is to say them."""


def parser(
    description: str, out: str, *, steps: int, warm_up_steps: int, learning_rate: float = 1e-4
) -> argparse.ArgumentParser:
    """Command line options of these examples."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, default=steps, help="GRPO steps")
    made.add_argument("--warm-up-steps", type=int, default=warm_up_steps, help="imitation steps")
    made.add_argument("--learning-rate", type=float, default=learning_rate)
    made.add_argument("--micro-batch", type=int, default=256, help="sequences per backward pass")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--shuffle-advantages", action="store_true", help="control: nothing should be learned")
    made.add_argument("--out", type=Path, default=Path(out))
    return made


def character_tokenizer(characters: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character and for each of `words`, the roles of a chat, and an end token."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([AddedToken(role, special=True) for role in ("<user>", "<assistant>", "<tool>")])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = CHAT
    return tokenizer


def make_policy(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Callable[[random.Random], Demonstration],
    options: argparse.Namespace,
    *,
    max_length: int = 256,
    max_gap: int = 0,
) -> Path:
    """A Qwen3 of 0.6 M parameters that has imitated `demonstrate`, saved with its tokenizer. `max_gap`: of `spread`."""
    draws = random.Random(options.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.warm_up_steps)
    for step in range(1, options.warm_up_steps + 1):
        loss = imitation_loss(model, tokenizer, [demonstrate(draws) for _ in range(128)], max_gap)
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


def imitation_loss(model: nn.Module, tokenizer: Any, demonstrations: list[Demonstration], max_gap: int) -> torch.Tensor:
    """Cross-entropy of what the policy is to say."""
    rows = []
    for demonstration in demonstrations:
        pieces = [(tokenizer.encode(text, add_special_tokens=False), is_own) for text, is_own in demonstration]
        tokens = [token for ids, _ in pieces for token in ids]
        labels = [token if is_own else -100 for ids, is_own in pieces for token in ids]
        rows.append((torch.tensor(tokens), torch.tensor(labels)))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([tokens for tokens, _ in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad([labels for _, labels in rows], batch_first=True, padding_value=-100)
    output = model(input_ids=tokens, position_ids=spread(tokens.shape, max_gap))
    logits = output.logits  # causal: padding on the right changes nothing before it
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def spread(shape: torch.Size, max_gap: int) -> torch.Tensor:
    """Positions with random gaps, [rows, tokens]: at most `max_gap` are left out between two tokens, in some rows none.

    Gaps keep a model from counting on distances, which are others in longer texts (Ruoss et al., 2023).
    """
    largest = torch.randint(0, max_gap + 1, (shape[0], 1))
    steps = 1 + (torch.rand(shape) * (largest + 1)).long()
    return steps.cumsum(1) - steps[:, :1]


def train(
    path: Path,
    play: dict[str, Any],
    params: SamplingParams,
    measure: Callable[[RolloutPolicy], Row],
    options: argparse.Namespace,
) -> list[Row]:
    """Train the policy at `path` by GRPO. `play`: arguments of its rollouts; `measure`: of the policy before a step."""
    options.out.mkdir(parents=True, exist_ok=True)
    with RolloutPolicy.from_pretrained(str(path), dtype="float32") as policy:
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        history = list(_steps(policy, trainer, play, params, measure, options))
    return history


def _steps(
    policy: RolloutPolicy,
    trainer: nn.Module,
    play: dict[str, Any],
    params: SamplingParams,
    measure: Callable[[RolloutPolicy], Row],
    options: argparse.Namespace,
) -> Iterator[Row]:
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    draws, start = random.Random(options.seed), time.perf_counter()
    sizes = {"num_episodes": NUM_STARTS, "num_samples": GROUP_SIZE, "use_tqdm": False}
    with open(options.out / "metrics.jsonl", "w") as metrics:
        for step in range(options.steps + 1):
            batch = policy.rollout(None, params, **sizes, **play, seed=draws.getrandbits(63))
            row = {"step": step, "reward": batch["next", "reward"].mean().item(), **measure(policy)}
            row["max_logprob_diff"] = update(trainer, optimizer, batch, options)
            policy.update_weights(trainer)
            row["seconds"] = time.perf_counter() - start
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            metrics.write(json.dumps(row) + "\n")
            yield row
    to_jsonl(batch, options.out / "rollouts.jsonl")


def draw(history: list[Row], lines: dict[str, str], title: str, path: Path) -> None:
    """Write the learning curve. `lines`: key of a row -> its label."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for key, label in lines.items():
        axes.plot([row["step"] for row in history], [row[key] for row in history], label=label)
    axes.set(xlabel="step", title=title)
    if all(0 <= row[key] <= 1 for row in history for key in lines):
        axes.set(ylim=(-0.02, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")
