"""Runs of TRL's trainers with a tiny model, for tests."""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ["one", "two plus two", "a", "four words are here"]


def model_of(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def grpo_trainer(
    checkpoint,
    out,
    *,
    kind=GRPOTrainer,
    model=None,
    reward=None,
    rollout_func=None,
    ref=None,
    rows=None,
    processing_class=None,
    **options,
):
    """A GRPO trainer of two prompts a step, four completions each, on the CPU, that saves and reports nothing."""
    defaults = dict(
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=3,
    )
    return kind(
        model=model or model_of(checkpoint),
        reward_funcs=reward or length_reward,
        args=GRPOConfig(output_dir=str(out), **(defaults | options)),
        train_dataset=Dataset.from_list(rows or [{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=processing_class or AutoTokenizer.from_pretrained(checkpoint),
        rollout_func=rollout_func,
    )


def length_reward(completions, **_):
    return [float(len(text)) for text in completions]


def logged(trainer, name):
    """The values of one metric, step by step."""
    return [row[name] for row in trainer.state.log_history if name in row]


class StepNotes(TrainerCallback):
    """Notes a value at the begin of every optimizer step."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_begin(self, *_, **__):
        self.seen.append(self.look())


def message_length_reward(completions, **_):
    """Of conversations. TRL's rollout worker imports it in a process of its own."""
    return [float(len(messages[-1]["content"])) for messages in completions]
