"""TRL's GRPOTrainer with this engine: the policy of examples/grpo.py learns to spell words backward.

    pip install "rollout-engine[examples,trl]"
    python examples/trl_grpo.py                       this engine generates, and the trainer is made exact
    python examples/trl_grpo.py --plain               this engine generates in vLLM's place, for TRL's own log-probs
    python examples/trl_grpo.py --generation trl      transformers generates, as TRL does by itself
    python examples/trl_grpo.py --shuffle-rewards     the control: same run, every reward dealt to another answer

The task and the made policy are those of examples/grpo.py, and imported from it; sampling, loss and optimizer are
TRL's. The last column is what TRL logs as `sampling/sampling_logp_difference/max`: the largest difference between the
engine's log-probs and the trainer's. It says 0.0, with `--plain` some millionths, and with `--generation trl` nothing,
as transformers returns no log-probs.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from envs_adapters.trainers.trl import ExactLogprobs, attach, make_rollout_func
from grpo import GROUP_SIZE, NUM_PROMPTS, NUM_UNSEEN, Entry, Task, draw, evaluate, make_items, make_policy
from rollout_engine import RolloutPolicy, exact

DIFFERENCE = "sampling/sampling_logp_difference/max"


class ExactGRPOTrainer(ExactLogprobs, GRPOTrainer):
    """TRL's trainer with log-probs by this engine's arithmetic."""


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
        task = Task(policy.tokenizer)
        trainer = make_trainer(task, training, policy, options)
        record = Record(policy, trainer, lambda: evaluate(policy, task, unseen))
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(record)
        trainer.train()
    history = record.rows
    (options.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    draw(history, options.out / "learning_curve.png")
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}; see {options.out}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="GRPO by TRL on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="checkpoint directory or hub id; default: a small policy made on the spot")
    parser.add_argument("--generation", choices=["engine", "trl"], default="engine", help="who generates")
    parser.add_argument("--plain", action="store_true", help="leave the trainer's arithmetic as it is")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, help="default: 4e-5; 1e-6 with --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_grpo"))
    options = parser.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = 4e-5 if options.model is None else 1e-6
    return options


def make_trainer(task: Task, training: list[Entry], policy: RolloutPolicy, options: argparse.Namespace) -> GRPOTrainer:
    """TRL's trainer, by itself (`--generation trl`) or with completions of `policy`."""
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    given: dict[str, Any] = {
        "reward_funcs": make_reward(task, training, options),
        "args": make_config(task, options),
        "train_dataset": make_dataset(task, training),
        "processing_class": AutoTokenizer.from_pretrained(options.model),
    }
    if options.generation == "trl":
        return GRPOTrainer(model=model, **given)
    if not options.plain:
        return ExactGRPOTrainer(model=exact.enable(model), rollout_func=make_rollout_func(policy), **given)
    trainer = GRPOTrainer(model=model, **given)
    attach(trainer, policy)
    return trainer


def make_config(task: Task, options: argparse.Namespace) -> GRPOConfig:
    """One optimizer step per batch of completions, as in examples/grpo.py."""
    return GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=task.max_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def make_dataset(task: Task, training: list[Entry]) -> Dataset:
    """A row per entry: its prompt as TRL wants it, and its number."""
    prompts = [prompt if isinstance(prompt, str) else prompt["messages"] for prompt in task.prompts(training)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))})


def make_reward(task: Task, training: list[Entry], options: argparse.Namespace) -> Any:
    """The reward function, as TRL calls it."""
    draws = random.Random(options.seed)

    def score(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        rewards = [task.score(text, training[place]) for text, place in zip(texts, number, strict=True)]
        if options.shuffle_rewards:
            draws.shuffle(rewards)
        return rewards

    return score


class Record(TrainerCallback):
    """One row per step: TRL's metrics, and the accuracy of the policy before the step's update."""

    def __init__(self, policy: RolloutPolicy, trainer: GRPOTrainer, accuracy: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._policy, self._trainer, self._accuracy = policy, trainer, accuracy

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._row = {"accuracy": self._evaluate()}
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._row["step_seconds"] = time.perf_counter() - self._start

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
        if "reward" not in logs:  # the summary of the whole training
            return
        difference = {"max_logprob_diff": float(logs[DIFFERENCE])} if DIFFERENCE in logs else {}
        row = {"step": state.global_step - 1, "reward": float(logs["reward"])} | self._row | difference
        self.rows.append(row)
        print(
            f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  "
            f"{row['step_seconds']:6.2f} s  max |log-prob diff| {row.get('max_logprob_diff', '-')}",
            flush=True,
        )

    def _evaluate(self) -> float:
        self._policy.update_weights(self._trainer.model)  # a second time in some steps, outside what is timed
        return float(self._accuracy())


if __name__ == "__main__":
    main()
