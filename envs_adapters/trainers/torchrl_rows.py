"""Sampled sequences in TorchRL's containers: one tensordict per sequence, with Tokens, Masks, LogProbs and the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import MetaData, TensorDict, lazy_stack
from torch import Tensor
from torch.nn.functional import pad
from torchrl.data.llm import History
from torchrl.modules.llm import ChatHistory, LogProbs, Masks, Text, Tokens

from envs_adapters.trainers.torchrl_prompts import Prompt


class Keys(NamedTuple):
    """The key of each container in a row; None for those it does not have."""

    text: Any
    tokens: Any
    masks: Any
    log_probs: Any
    history: Any
    versions: Any

    @classmethod
    def of(cls, input_mode: str, options: Mapping[str, Any]) -> "Keys":
        """The keys that a policy with these options writes, each named by its option `NAME_key`."""
        keys = cls(**{name: options[f"{name}_key"] for name in cls._fields})
        if input_mode == "tokens":
            keys = keys._replace(text=None)
        return keys if input_mode == "history" else keys._replace(history=None)


class Sample(NamedTuple):
    """One sampled sequence, without padding."""

    prompt: Tensor
    """int64 [P]."""
    response: Tensor
    """int64 [R], end token included."""
    log_probs: Tensor
    """float32 [R]."""
    versions: Tensor
    """int64 [R]: the version of the weights that sampled each token."""
    sampled: Tensor
    """bool [R]: False for tokens that a budget of thinking forced."""
    text: str


class Widths(NamedTuple):
    """Padded lengths of prompts, on their left, and of responses, on their right."""

    prompt: int
    response: int
    pad_token_id: int

    @classmethod
    def of(cls, samples: list[Sample], pad_token_id: int) -> "Widths":
        """The longest of each."""
        return cls(
            max(len(sample.prompt) for sample in samples), max(len(sample.response) for sample in samples), pad_token_id
        )


def samples_of(batch: TensorDict) -> list[Sample]:
    """The sequences of a padded batch of `RolloutPolicy.rollout`."""
    prompts, responses = batch["masks", "prompt"], batch["masks", "response"]
    in_full = batch["policy_version"] >= 0
    columns = (
        _parts(batch["tokens", "prompt"], prompts),
        _parts(batch["tokens", "response"], responses),
        _parts(batch["log_probs", "response"], responses),
        _parts(batch["policy_version"], in_full),
        _parts(batch["masks", "all_assistant_mask"], in_full),
        batch["text", "response"],
    )
    return [Sample(*values) for values in zip(*columns, strict=True)]


def _parts(padded: Tensor, real: Tensor) -> Sequence[Tensor]:
    """The values of each row of [B, T] at which `real` is True."""
    parts: tuple[Tensor, ...] = padded[real].split(real.sum(1).tolist())
    return parts


def row_of(sample: Sample, asked: Prompt, keys: Keys, widths: Widths | None) -> TensorDict:
    """A tensordict of batch size [] with the containers that `keys` names, of a sample and the prompt it is for.

    `widths`: pad to these; None: no padding. Log-probs of prompt tokens are NaN, which GRPOLoss leaves
    out; versions of them are -1.
    """
    padded = MetaData(widths is not None)
    if widths is None:
        widths = Widths(len(sample.prompt), len(sample.response), 0)
    left, right = widths.prompt - len(sample.prompt), widths.response - len(sample.response)
    prompt = pad(sample.prompt, (left, 0), value=widths.pad_token_id)
    response = pad(sample.response, (0, right), value=widths.pad_token_id)
    real = torch.ones(len(sample.prompt) + len(sample.response), dtype=torch.bool)
    log_probs = pad(sample.log_probs, (0, right))
    contents = {
        keys.tokens: Tokens(prompt=prompt, response=response, full=torch.cat([prompt, response]), padded=padded),
        keys.masks: Masks(
            all_attention_mask=pad(real, (left, right)),
            all_assistant_mask=pad(sample.sampled, (widths.prompt, right)),
            padded=padded,
        ),
        keys.log_probs: LogProbs(
            response=log_probs, full=pad(log_probs, (widths.prompt, 0), value=torch.nan), padded=padded
        ),
        keys.versions: TensorDict(full=pad(pad(sample.versions, (0, right), value=-1), (widths.prompt, 0), value=-1)),
    }
    if asked.text is not None:
        contents[keys.text] = Text(prompt=asked.text, response=sample.text, full=asked.text + sample.text)
    if asked.history is not None:
        reply = History(role="assistant", content=sample.text, batch_size=(1,))
        full = asked.history.extend(reply, inplace=False)
        contents[keys.history] = ChatHistory(prompt=asked.history, response=reply, full=full)
    row = TensorDict(batch_size=())
    for key, value in contents.items():
        if key is not None:
            row.set(key, value)
    return row


def stack_rows(rows: list[TensorDict], shape: tuple[int, ...]) -> TensorDict:
    """Rows as a lazy stack of this shape, the last index running fastest."""
    if len(shape) == 1:
        return lazy_stack(rows)
    size = len(rows) // shape[0]
    return lazy_stack([stack_rows(rows[start : start + size], shape[1:]) for start in range(0, len(rows), size)])
