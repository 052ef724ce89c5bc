"""Prompts of a batch of TorchRL's: conversations, texts or token ids, one per row."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.llm import History

from rollout_engine.base.errors import ConfigError

InputMode = Literal["history", "text", "tokens"]
MODES = ("history", "text", "tokens")


class Prompt(NamedTuple):
    """The prompt of a row."""

    content: str | tuple[int, ...]
    """A text, or token ids."""
    text: str | None
    history: History | None
    """The conversation so far, [number of messages]."""


class PromptReader:
    """Reads prompts of one kind at one key."""

    def __init__(self, key: Any, options: Mapping[str, Any], tokenizer: Callable[[], Any]) -> None:
        """`options`: those of an `EnginePolicy`. `tokenizer` gives the engine's; called when it is needed."""
        self._mode, self._key, self._tokenizer = options["input_mode"], key, tokenizer
        self._tokens_key, self._prefer_tokens = options["tokens_key"], options["prefer_tokens"]
        self._template = {name: options[name] for name in ("chat_template", "chat_template_name")}

    def read(self, rows: TensorDictBase) -> list[Prompt]:
        """One prompt per row of `rows`, whose batch size is [B]. Raises `ConfigError` if there is none."""
        given = rows.get(self._key, None, as_list=True) if self._mode == "tokens" else rows.get(self._key, None)
        if given is None:
            keys = ", ".join(sorted(map(str, rows.keys(True))))
            raise ConfigError(f"input_mode={self._mode!r} reads {self._key}, and the input has only {keys}.")
        if self._mode == "tokens":
            return [Prompt(ids, None, None) for ids in self._ids(given, rows)]
        if self._mode == "text":
            texts = [given] if isinstance(given, str) else given if isinstance(given, list) else given.tolist()
            return [Prompt(text, text, None) for text in texts]
        if not isinstance(given, History):
            raise ConfigError(f"input_mode='history' wants a History at {self._key}, not a {type(given).__name__}.")
        tokenizer = self._tokenizer()
        texts = list(given.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=True, **self._template))
        known = rows.get((self._tokens_key, "prompt"), None, as_list=True) if self._prefer_tokens else None
        if known is not None:
            ids: Iterable[tuple[int, ...]] = self._ids(known, rows)
        else:
            ids = map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"])
        return [Prompt(*each) for each in zip(ids, texts, given.unbind(0), strict=True)]

    def _ids(self, given: Sequence[Any], rows: TensorDictBase) -> list[tuple[int, ...]]:
        """Ids of each row, without padding on the left if the tokens are marked as padded."""
        each = [row.flatten().tolist() if isinstance(row, Tensor) else list(row) for row in given]
        if not _is_padded(rows.get((self._tokens_key, "padded"), None)):
            return [tuple(row) for row in each]
        padding = pad_token_id(self._tokenizer())
        return [tuple(itertools.dropwhile(lambda token: token == padding, row)) for row in each]


def pad_token_id(tokenizer: Any) -> int:
    """The id that pads: the tokenizer's own, or its end id, or 0."""
    ids: tuple[int | None, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in ids if token is not None)


def _is_padded(value: Any) -> bool:
    """The `padded` of a Tokens: one value, or a stack's combination of one per row."""
    while not isinstance(value, bool) and value is not None:
        value = value[0] if isinstance(value, list) else value.tolist()
    return bool(value)
