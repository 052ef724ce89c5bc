"""Environments of TorchRL, written as its documentation says."""

import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.transforms import Transform


class Guess(EnvBase):
    """Guess a number of two digits, drawn from the global generator; ends when it is right."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size=batch_size)
        self.observation_spec = Composite(observation=NonTensor(shape=batch_size), shape=batch_size)
        self.action_spec = NonTensor(shape=batch_size, example_data="a number")
        self.reward_spec = Unbounded(shape=(*batch_size, 1))

    def _set_seed(self, seed): ...

    def _reset(self, tensordict=None, **options):
        self.number = int(torch.randint(10, 100, ()))
        return self._said("A number from 10 to 99?")

    def _step(self, tensordict):
        [guess] = tensordict["action"] if self.batch_size else [tensordict["action"]]
        after = self._said("More." if int(guess) < self.number else "Less.")
        after["reward"] = torch.full((*self.batch_size, 1), -abs(int(guess) - self.number) / 100)
        after["done"] = torch.full((*self.batch_size, 1), int(guess) == self.number)
        return after

    def _said(self, text):
        said = [text] if self.batch_size else NonTensorData(text)
        done = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        return TensorDict({"observation": said, "done": done}, self.batch_size)


class Remark(Transform):
    """Remarks on each answer, and rewards its length."""

    def _step(self, tensordict, next_tensordict):
        history = next_tensordict["history"]
        words = len(history.prompt[0][-1].content.split())
        remark = History(role="user", content=f"{words} words.", batch_size=()).unsqueeze(0).unsqueeze(0)
        history.prompt = history.prompt.extend(remark, inplace=False, dim=-1)
        next_tensordict["history"] = history
        next_tensordict["reward"] = torch.full((1, 1), float(words))
        return next_tensordict


class Forget(Transform):
    """Forgets how the conversation began."""

    def _step(self, tensordict, next_tensordict):
        history = next_tensordict["history"]
        history.prompt = history.prompt[:, -1:]
        next_tensordict["history"] = history
        return next_tensordict


def remarks(max_steps=3, system_prompt="Be brief."):
    chat = ChatEnv(batch_size=(1,), input_mode="history", system_prompt=system_prompt)
    return TransformedEnv(chat, Compose(Remark(), StepCounter(max_steps=max_steps)))


def forgets():
    return TransformedEnv(ChatEnv(batch_size=(1,), input_mode="history"), Forget())


def as_text():
    return ChatEnv(batch_size=(1,), input_mode="text")


def of_questions(seed):
    questions = [{"query": f"question {number}"} for number in range(50)]
    loader = torch.utils.data.DataLoader(
        questions, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(seed), collate_fn=_together
    )
    return DatasetChatEnv.from_dataloader(loader, batch_size=(1,), input_mode="history")


def _together(rows):
    return TensorDict({"query": [row["query"] for row in rows]}, [len(rows)])


def nothing():
    return None


def too_many():
    return Guess(batch_size=(2,))
