"""TorchRL's LLMCollector, MCAdvantage and GRPOLoss with this engine: the policy of examples/grpo.py learns to spell
words backward.

    pip install "rollout-engine[examples,torchrl]"
    python examples/torchrl_grpo.py                       the trained model is exact: its log-probs are the engine's
    python examples/torchrl_grpo.py --plain               TorchRL's own log-probs of the trained model
    python examples/torchrl_grpo.py --own-process         the engine in a process of its own, found by its address
    python examples/torchrl_grpo.py --shuffle-rewards     the control: same run, every reward dealt to another answer

The task and the made policy are those of examples/grpo.py, and imported from it; environment, collector, advantages
and loss are TorchRL's. The last column is the largest difference between the engine's log-probs and the trained
model's before an update: 0.0, and with `--plain` some millionths.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from envs_adapters.trainers.torchrl import EnginePolicy, EngineWeightSyncScheme, ExactTransformersWrapper
from grpo import CLIP, GROUP_SIZE, NUM_PROMPTS, NUM_UNSEEN, Entry, Task, draw, evaluate, make_items, make_policy
from rollout_engine import AsyncLLM, RolloutPolicy, exact

NUM_ANSWERS = NUM_PROMPTS * GROUP_SIZE
LAST_MESSAGE = "{{ messages[-1]['content'] }}"
"""Chat template of the made policy, which knows no roles."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the example; returns the rows written to metrics.jsonl."""
    options = parse(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    training, unseen = make_items(options.seed)
    if options.model is None:
        options.model = make_policy(options.out / "policy", training, options)
    with make_engine(options) as engine:
        history = list(train(engine, Task(engine.tokenizer), training, unseen, options))
    (options.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    draw(history, options.out / "learning_curve.png")
    first, last = history[0]["accuracy"], history[-1]["accuracy"]
    print(f"accuracy on {NUM_UNSEEN} unseen words: {first:.3f} -> {last:.3f}; see {options.out}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="GRPO by TorchRL on reasoning-gym's spell_backward.")
    parser.add_argument("--model", help="checkpoint directory or hub id; default: a small policy made on the spot")
    parser.add_argument("--plain", action="store_true", help="leave the trained model's arithmetic as it is")
    parser.add_argument("--own-process", action="store_true", help="run the engine in a process of its own")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=600, help="imitation steps of the made policy")
    parser.add_argument("--learning-rate", type=float, help="default: 4e-5; 1e-6 with --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle-rewards", action="store_true", help="control: nothing should be learned")
    parser.add_argument("--out", type=Path, default=Path("runs/torchrl_grpo"))
    options = parser.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = 4e-5 if options.model is None else 1e-6
    return options


def make_engine(options: argparse.Namespace) -> RolloutPolicy:
    """The engine, in this process or one of its own."""
    if options.own_process:
        return RolloutPolicy(AsyncLLM(str(options.model), dtype="float32"))
    return RolloutPolicy.from_pretrained(str(options.model), dtype="float32")


def train(
    engine: RolloutPolicy, task: Task, training: list[Entry], unseen: list[Entry], options: argparse.Namespace
) -> Iterator[dict[str, float]]:
    """Yield one row of metrics per step. A row's accuracy is that of the policy before the step's update."""
    actor = make_actor(engine, options)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=options.learning_rate, weight_decay=0.0)
    loss_module = GRPOLoss(actor, clip_epsilon=CLIP, entropy_bonus=False)
    collector = make_collector(engine, task, training, options)
    sync = EngineWeightSyncScheme(engine)
    sync.init_on_sender(model_id="policy", context=collector, model=actor)
    sync.register_collector(collector)
    sync.connect()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(NUM_ANSWERS), sampler=SamplerWithoutReplacement(), batch_size=NUM_ANSWERS
    )
    buffer.append_transform(MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="query"))
    start = time.perf_counter()
    for step, data in enumerate(collector):
        buffer.extend(data.reshape(-1))
        batch = buffer.sample()
        row = {
            "step": step,
            "reward": batch["next", "reward"].mean().item(),
            "max_logprob_diff": largest_difference(actor, batch),
        }
        loss_module(batch).loss_objective.backward()
        clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()
        row["step_seconds"] = time.perf_counter() - start
        row["accuracy"] = evaluate(engine, task, unseen)
        report(row)
        yield row
        start = time.perf_counter()
        sync.send()


def make_actor(engine: RolloutPolicy, options: argparse.Namespace) -> TransformersWrapper:
    """TorchRL's wrapper of the trained model, exact or as it is."""
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    settings: Any = {"tokenizer": engine.tokenizer, "input_mode": "tokens", "generate": False}
    if options.plain:
        return TransformersWrapper(model, **settings)
    return ExactTransformersWrapper(exact.enable(model), **settings)


def make_collector(
    engine: RolloutPolicy, task: Task, training: list[Entry], options: argparse.Namespace
) -> LLMCollector:
    """32 prompts a batch, 8 answers each. TorchRL repeats a prompt; the engine computes it once."""
    draws = torch.Generator().manual_seed(options.seed)
    questions = {question(prompt): entry for prompt, entry in zip(task.prompts(training), training, strict=True)}
    env = ChatEnv.from_dataloader(
        DataLoader([{"query": text} for text in questions], NUM_PROMPTS, shuffle=True, generator=draws),
        repeats=GROUP_SIZE,
        batch_size=(NUM_ANSWERS,),
        tokenizer=engine.tokenizer,
        input_mode="text",  # histories take TorchRL twice the time, and one question needs none
        template_kwargs=None if task.chat else {"chat_template": LAST_MESSAGE},
    )
    policy = EnginePolicy(
        engine,
        input_mode="text",
        generate_kwargs={"max_new_tokens": task.max_tokens},
        seed=options.seed,
    )
    return LLMCollector(
        env.append_transform(SpellingReward(task, questions, options)),
        policy=policy,
        dialog_turns_per_batch=NUM_ANSWERS,
        total_dialog_turns=NUM_ANSWERS * (options.steps + 1),
    )


def question(prompt: Any) -> str:
    """A prompt of the task's as one message."""
    return prompt if isinstance(prompt, str) else prompt["messages"][0]["content"]


class SpellingReward(Transform):
    """Scores each answer and ends the conversation after it."""

    def __init__(self, task: Task, questions: dict[str, Entry], options: argparse.Namespace) -> None:
        super().__init__()
        self.task, self.questions = task, questions
        self.draws = random.Random(options.seed) if options.shuffle_rewards else None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        answered = zip(tensordict["text", "response"], tensordict["query"], strict=True)
        rewards = [self.task.score(answer, self.questions[asked]) for answer, asked in answered]
        if self.draws is not None:
            self.draws.shuffle(rewards)
        next_tensordict["reward"] = torch.tensor(rewards).view(-1, 1, 1)
        for key in ("done", "terminated"):
            next_tensordict[key] = torch.ones(len(rewards), 1, dtype=torch.bool)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


@torch.no_grad()
def largest_difference(actor: TransformersWrapper, batch: TensorDictBase) -> float:
    """Between the actor's log-probs of the sampled tokens and those that came with them."""
    ours = actor(batch.copy()).get(("log_probs", "full"), as_list=True)
    sampled = batch.get(("log_probs", "full"), as_list=True)
    masks = batch.get(("masks", "all_assistant_mask"), as_list=True)
    rows = zip(ours, sampled, masks, strict=True)
    return max((mine - engines)[mask].abs().max().item() for mine, engines, mask in rows)


def report(row: dict[str, float]) -> None:
    """Print one step."""
    print(
        f"step {row['step']:3d}  reward {row['reward']:.3f}  accuracy {row['accuracy']:.3f}  "
        f"{row['step_seconds']:6.2f} s  max |log-prob diff| {row['max_logprob_diff']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
