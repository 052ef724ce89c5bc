"""Tinker's SDK trains an adapter on a laptop: first by shown answers, then by rewards for sampled ones.

    pip install "rollout-engine[server,tinker]"
    rollout-engine serve path/or/hub-id --tinker runs/tinker --served-model-name my/model
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/tinker_train.py --model my/model

The task is to spell a word backwards; a reward is the share of its letters that are in their places. The last column
is the largest difference between log-probs of the same tokens in training and in sampling: 0.0.
"""

import argparse
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types

WORDS = "acre bale care dune edge fade gate hare idea jade kale lace mane nape oval pane race sale tape vane".split()


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Run the example; returns the mean losses of tokens, rewards, and differences of log-probs, one a step."""
    options = parse(arguments)
    history: dict[str, list[float]] = {"nll": [], "reward": [], "difference": []}
    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client(
            base_model=options.model, rank=options.rank, seed=options.seed, train_unembed=False
        ).result()
        task = Task(training.get_tokenizer())
        adam = types.AdamParams(learning_rate=options.learning_rate)
        for step in range(options.supervised_steps):
            passed, stepped = training.forward_backward(task.shown(), "cross_entropy"), training.optim_step(adam)
            history["nll"].append(passed.result().metrics["loss:sum"] / task.num_shown)
            stepped.result()
            print(f"shown {step}  nll {history['nll'][-1]:.3f}", flush=True)
        draws = random.Random(options.seed)
        adam = types.AdamParams(learning_rate=options.rl_learning_rate)
        for step in range(options.rl_steps):
            reward, difference = reinforce(training, task, adam, draws.sample(WORDS, 10), options.group_size, step)
            history["reward"].append(reward)
            history["difference"].append(difference)
            print(f"sampled {step}  reward {reward:.3f}  max_logprob_diff {difference}", flush=True)
        print(f"saved as {training.save_weights_for_sampler('final').result().path}")
    return history


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description="Tinker's SDK trains an adapter.")
    parser.add_argument("--model", required=True, help="the name under which the model is served")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--supervised-steps", type=int, default=10)
    parser.add_argument("--rl-steps", type=int, default=40)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--rl-learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Task:
    """Words to be spelled backwards."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, word: str) -> list[int]:
        """Token ids of a question."""
        ids: list[int] = self._tokenizer.encode(f"{word} backwards: ", add_special_tokens=False)
        return ids

    def answer(self, word: str) -> list[int]:
        """Token ids of the right answer."""
        ids: list[int] = self._tokenizer.encode(word[::-1], add_special_tokens=False)
        return ids

    def reward(self, word: str, token_ids: list[int]) -> float:
        """The share of letters that are right."""
        text = self._tokenizer.decode(token_ids).strip()
        return sum(a == b for a, b in zip(text, word[::-1], strict=False)) / len(word)

    def shown(self) -> list[types.Datum]:
        """All words with their answers."""
        return [datum(self.prompt(word), self.answer(word)) for word in WORDS]

    @property
    def num_shown(self) -> int:
        """Tokens of all answers."""
        return sum(len(self.answer(word)) for word in WORDS)


def datum(prompt: list[int], answer: list[int], **inputs: list[float]) -> types.Datum:
    """A sequence whose answer counts; `inputs`: values of its tokens, `weights` 1 without any."""
    zeros = [0.0] * (len(prompt) - 1)
    values = inputs or {"weights": [1.0] * len(answer)}
    of_tokens = {name: np.array(zeros + each, np.float32) for name, each in values.items()}
    targets = np.array([0] * len(zeros) + answer)
    tokens = types.ModelInput.from_ints(prompt + answer[:-1])
    return types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, **of_tokens})


def reinforce(
    training: tinker.TrainingClient, task: Task, adam: types.AdamParams, words: list[str], group_size: int, seed: int
) -> tuple[float, float]:
    """One step: sample each word's answers, and weigh them by their rewards less the group's mean."""
    sampler = training.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=4, seed=seed, stop=[])
    asked = [sampler.sample(types.ModelInput.from_ints(task.prompt(word)), group_size, settings) for word in words]
    data, rewards, sampled = [], [], []
    for word, future in zip(words, asked, strict=True):
        sequences = future.result().sequences
        group = [task.reward(word, each.tokens) for each in sequences]
        rewards += group
        for each, reward in zip(sequences, group, strict=True):
            advantage = [reward - sum(group) / len(group)] * len(each.tokens)
            data.append(datum(task.prompt(word), each.tokens, logprobs=each.logprobs, advantages=advantage))
            sampled.append(np.float32(each.logprobs))
    passed, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(adam)
    found = [output["logprobs"].to_numpy() for output in passed.result().loss_fn_outputs]
    stepped.result()
    apart = [np.abs(new[-len(old) :] - old).max() for new, old in zip(found, sampled, strict=True)]
    return sum(rewards) / len(rewards), float(max(apart))


if __name__ == "__main__":
    main()
