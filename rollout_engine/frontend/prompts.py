"""The kinds of prompt a user may give, told apart and checked for their form.

    "text"   [1, 2, 3]   {"prompt": "text"}   {"prompt_token_ids": [1, 2, 3]}   {"messages": [...], "tools": [...]}

Dictionaries may also carry "cache_salt". A list of any of these is a batch; a list that starts with an int is one
prompt.
"""

from typing import Any

import numpy as np

from rollout_engine.errors import RequestError, unknown_name

Prompt = str | list[int] | dict[str, Any]

_KINDS = ("prompt", "prompt_token_ids", "messages")
_KEYS = (*_KINDS, "tools", "cache_salt")


def as_batch(prompts: Any) -> list[Any] | None:
    """The prompts of a batch; None: it is one prompt. Raises `RequestError` for neither."""
    if isinstance(prompts, str | dict | np.ndarray):
        return None
    if not isinstance(prompts, list | tuple):
        raise _not_a_prompt(prompts)
    return None if prompts and isinstance(prompts[0], int | np.integer) else list(prompts)


def as_fields(prompt: Any) -> dict[str, Any]:
    """The dictionary form of any prompt, its keys checked. Raises `RequestError`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list | tuple | np.ndarray):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, dict):
        raise _not_a_prompt(prompt)
    for key in prompt:
        if key not in _KEYS:
            raise RequestError(unknown_name("prompt key", str(key), _KEYS), field=str(key), value=prompt[key])
    given = [kind for kind in _KINDS if kind in prompt]
    if len(given) != 1:
        raise RequestError.for_field("prompt", given, f"a dictionary with exactly one of {', '.join(_KINDS)}")
    _check_field(prompt, "prompt", str)
    _check_field(prompt, "cache_salt", str)
    _check_field(prompt, "messages", list)
    _check_field(prompt, "tools", list)
    if prompt.get("tools") is not None and "messages" not in prompt:
        raise RequestError.for_field("tools", prompt["tools"], "given with messages")
    return prompt


def as_token_ids(value: Any, field: str, vocab_size: int) -> list[int]:
    """A fresh list of ids in [0, vocab_size). Raises `RequestError` naming the first bad position."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise RequestError.for_field(field, value, "a list of token ids")
    token_ids = list(value)
    if set(map(type, token_ids)) - {int}:  # rare: numpy integers, or a mistake
        token_ids = [_as_int(token_id, f"{field}[{i}]") for i, token_id in enumerate(token_ids)]
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        bound = f"in [0, {vocab_size}), the vocabulary"
        raise RequestError.for_field(f"{field}[{position}]", token_ids[position], bound)
    return token_ids


def _as_int(token_id: Any, field: str) -> int:
    if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
        raise RequestError.for_field(field, token_id, "an int, a token id")
    return int(token_id)


def _check_field(prompt: dict[str, Any], key: str, kind: type) -> None:
    value = prompt.get(key)
    optional = key in ("tools", "cache_salt")
    if key in prompt and not (isinstance(value, kind) or (optional and value is None)):
        raise RequestError.for_field(key, value, f"a {kind.__name__}")


def _not_a_prompt(value: Any) -> RequestError:
    kinds = "a str, a list of token ids, a dictionary (prompt, prompt_token_ids or messages), or a list of these"
    return RequestError.for_field("prompt", value, kinds)
