"""Policies, environments and collectors of TorchRL's with a tiny model, for tests."""

import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import ChatHistory, Text, Tokens

PROMPTS = ["one", "two plus two", "a", "four words are here"]


def texts(*prompts):
    """Rows that ask for completions of texts."""
    return lazy_stack([TensorDict(text=Text(prompt=prompt)) for prompt in prompts])


def token_rows(*prompts):
    """Rows that ask for completions of token ids."""
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(prompt))) for prompt in prompts])


def chats(*questions):
    """Rows that ask for answers to one message each."""
    history = History.from_chats([[{"role": "user", "content": question}] for question in questions])
    return TensorDict(history=ChatHistory(prompt=history), batch_size=[len(questions)])


def ragged(rows, *key):
    """One tensor per row."""
    return rows.get(key, as_list=True)


class LengthReward(Transform):
    """The number of characters of each answer, after which the conversation is over."""

    def _step(self, tensordict, next_tensordict):
        rewards = [float(len(answer)) for answer in tensordict["text", "response"]]
        next_tensordict["reward"] = torch.tensor(rewards).view(-1, 1, 1)
        for key in ("done", "terminated"):
            next_tensordict[key] = torch.ones(len(rewards), 1, dtype=torch.bool)
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def chat_env(tokenizer, *, repeats=4, batch_size=8):
    """Two of PROMPTS a batch, each `repeats` times in a row."""
    env = ChatEnv.from_dataloader(
        DataLoader([{"query": prompt} for prompt in PROMPTS], 2),
        repeats=repeats,
        batch_size=(batch_size,),
        tokenizer=tokenizer,
    )
    return env.append_transform(LengthReward())


def collector_of(policy, tokenizer, *, batches=2, **options):
    """Batches of 8 answers: two prompts, four each."""
    return LLMCollector(
        chat_env(tokenizer), policy=policy, dialog_turns_per_batch=8, total_dialog_turns=8 * batches, **options
    )
