"""Distinguishes the kinds of prompts and checks their form.

    "text"   [1, 2, 3]   [{"role": "user", "content": "text"}]
    {"prompt": "text"}   {"prompt_token_ids": [1, 2, 3]}   {"messages": [{"role": ...}], "tools": [...]}

Token ids may be an array or tensor of one dimension. Dictionaries may also carry "multi_modal_data" ({"image": [...]},
the images of its placeholders), "cache_salt", "lora_request" (an adapter that the engine has, or its name), with a text
"add_special_tokens" (False: the tokenizer adds none), with token ids "pictures" (`PlacedPicture`s; the ids have all
their placeholders), and with a conversation the options of `ChatOptions`. A list of any of these is a batch; a list
that starts with an int or with a message (a dictionary with "role" or "content") is one prompt.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RequestError, check_text_size, unknown_name
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.messages import MAX_CACHE_SALT_BYTES
from rollout_engine.base.peer_options import CALL_PEERS, POOLING_PEERS, SAMPLING_PEERS, peer_option
from rollout_engine.base.pooling_params import PoolingParams
from rollout_engine.base.sampling_params import SamplingParams, TruncationSide
from rollout_engine.base.structs import plain
from rollout_engine.text.conversations import (
    CHAT_KEYS,
    PROMPT_KINDS,
    ChatOptions,
    as_messages,
    check_chat_options,
    is_conversation,
    is_message,
)

Prompt = str | list[int] | list[dict[str, Any]] | dict[str, Any]

PROMPT_KEYS = (
    *(*PROMPT_KINDS, *CHAT_KEYS, "add_special_tokens", "cache_salt", "lora_request"),
    *("multi_modal_data", "pictures"),
)
_POOLING_VERBS = ("encode", "reward")
_PEERS = {
    "vLLM's": {
        "multi_modal_uuids": "pictures are known by their pixels; leave it out",
        "mm_processor_kwargs": "the checkpoint's files set how pictures are processed; leave it out",
    }
    | dict.fromkeys(("prompt_embeds", "encoder_prompt"), "a prompt is text or token ids"),
    "Hugging Face's": {
        "input_ids": "give prompt_token_ids, without padding",
        "attention_mask": "give prompt_token_ids without padding, and no mask",
        "conversation": "give messages",
    },
}


def as_batch(prompts: Any) -> list[Any] | None:
    """Return the prompts of a batch, or None for a single prompt. Raises `RequestError` for anything else."""
    if isinstance(prompts, str | Mapping):
        return None
    if _is_array(prompts) and getattr(prompts.dtype, "kind", "") not in ("O", "U"):
        _refuse_rows(prompts)
        return None
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | set | frozenset):
        raise _not_a_prompt(prompts)
    listed = list(prompts)
    return None if listed and _is_id(listed[0]) or is_conversation(listed) else listed


def chosen_prompts(prompts: Any, token_ids: Any) -> Any:
    """Return the prompts of a call that takes them in two ways, `prompts` or `token_ids`. Raises `RequestError`."""
    if prompts is not None and token_ids is not None:
        raise RequestError(
            "prompts and prompt_token_ids are both given: give one of them.",
            field="prompt_token_ids",
            value=token_ids,
        )
    if token_ids is None:
        if prompts is None:
            raise RequestError.for_field("prompts", None, "one prompt or a list of them, or use prompt_token_ids")
        return prompts
    batch = as_batch(token_ids)
    for each in [token_ids] if batch is None else batch:
        if isinstance(each, str | Mapping):
            raise RequestError.for_field("prompt_token_ids", each, "token ids, or a list of such", "Texts are prompts.")
    return token_ids


def as_fields(prompt: Any) -> dict[str, Any]:
    """Return any prompt as a dictionary. Raises `RequestError` for unknown keys and values of the wrong form."""
    fields = _to_dict(prompt)
    for key in fields:
        if key not in PROMPT_KEYS:
            raise RequestError(_unknown_key(str(key), fields), field=str(key), value=fields[key])
    if is_conversation(fields.get("prompt")) and "messages" not in fields:
        fields = {"messages" if key == "prompt" else key: value for key, value in fields.items()}
    given = [kind for kind in PROMPT_KINDS if kind in fields]
    if len(given) != 1:
        raise RequestError.for_field("prompt", given, f"a dictionary with exactly one of {', '.join(PROMPT_KINDS)}")
    _check_text(fields, "prompt", "a str, or a conversation")
    if fields.get("cache_salt") is not None:
        _check_text(fields, "cache_salt", "a str")
        check_text_size("cache_salt", fields["cache_salt"], MAX_CACHE_SALT_BYTES)
    if fields.get("lora_request") is not None:
        as_lora_request(fields["lora_request"])
    adds = fields.get("add_special_tokens")
    if adds is not None and not ("prompt" in fields and isinstance(adds, bool)):
        raise RequestError.for_field("add_special_tokens", adds, "a bool, given with a text (prompt)")
    if "pictures" in fields and ("prompt_token_ids" not in fields or "multi_modal_data" in fields):
        shown = f"{type(fields['pictures']).__name__}"
        hint = "Images are given as multi_modal_data, or in the messages."
        raise RequestError.for_field("pictures", shown, "given with prompt_token_ids, which have places for them", hint)
    if "messages" in fields:
        check_chat_options(fields)
        return {**fields, "messages": as_messages(fields["messages"])}
    for key, value in fields.items():
        if key in CHAT_KEYS and value is not None:
            raise RequestError.for_field(key, value, "given with a conversation (messages)")
    return fields


def check_chat_arguments(
    options: Mapping[str, Any], verb: Callable[..., Any], known: Sequence[str] = CHAT_KEYS
) -> None:
    """Raise `RequestError` for a keyword argument of `verb` that is not among its `known` ones, naming its place."""
    for name, value in options.items():
        if name not in known:
            raise RequestError(_unknown_argument(name, verb, known), field=name, value=value)


def with_chat_options(prompts: Any, options: ChatOptions) -> Any:
    """Return the prompt or batch with `options` added to every prompt; a prompt's own options win."""
    if not options:
        return prompts
    batch = as_batch(prompts)
    return _with(options, prompts) if batch is None else [_with(options, prompt) for prompt in batch]


def with_lora(prompts: Any, lora: LoRALike | Sequence[LoRALike | None] | None) -> Any:
    """Return the prompt or batch with an adapter, one for all or one each, added to prompts that name none."""
    if lora is None:
        return prompts
    batch = as_batch(prompts)
    if batch is None and not isinstance(lora, list | tuple):
        return _with({"lora_request": as_lora_request(lora)}, prompts)
    listed = [prompts] if batch is None else batch
    each = lora if isinstance(lora, list | tuple) else [lora] * len(listed)
    if len(each) != len(listed):
        bound = f"one adapter, or {len(listed)}: one per prompt"
        raise RequestError.for_field("lora_request", f"a list of {len(each)}", bound)
    pairs = zip(each, listed, strict=True)
    return [p if one is None else _with({"lora_request": as_lora_request(one)}, p) for one, p in pairs]


def adapter_name(prompt: Any) -> str | None:
    """The name of the adapter that a prompt asks for; None: the base alone."""
    lora = prompt.get("lora_request") if isinstance(prompt, Mapping) else None
    return None if lora is None else as_lora_request(lora).name


def truncated(token_ids: list[int], most: int | None, side: TruncationSide) -> list[int]:
    """Cut a prompt to `most` tokens at its left or right end; None leaves it whole."""
    if most is None:
        return token_ids
    return token_ids[-most:] if side == "left" else token_ids[:most]


def as_token_ids(value: Any, field: str, vocab_size: int) -> list[int]:
    """Return a new list of ids in [0, vocab_size). Raises `RequestError` naming the first bad position."""
    if _is_array(value) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise RequestError.for_field(field, value, "a list of token ids")
    token_ids = list(value)
    if [*map(type, token_ids)].count(int) != len(token_ids):  # rare: numpy integers, or a mistake
        token_ids = [_as_int(token_id, f"{field}[{i}]") for i, token_id in enumerate(token_ids)]
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        bound = f"in [0, {vocab_size}), the vocabulary"
        raise RequestError.for_field(f"{field}[{position}]", token_ids[position], bound)
    return token_ids


def _with(options: Mapping[str, Any], prompt: Any) -> Any:
    try:
        return {**options, **_to_dict(prompt)}
    except RequestError:
        return prompt  # refused with its index when all prompts are checked


def _to_dict(prompt: Any) -> dict[str, Any]:
    """Return any prompt as a dictionary without checking its values."""
    if isinstance(prompt, Mapping):
        if is_message(prompt):
            raise RequestError.for_field("prompt", prompt, "a prompt, not a message", "Put the message into a list.")
        return dict(prompt)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if is_conversation(prompt):
        return {"messages": prompt}
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple | Mapping):
        hint = "Each request of add_request and AsyncLLM.generate is one."
        raise RequestError.for_field("prompt", prompt, "one prompt, not a list of them", hint)
    if isinstance(prompt, list | tuple) or _is_array(prompt):
        return {"prompt_token_ids": prompt}
    raise _not_a_prompt(prompt)


def _is_array(value: Any) -> bool:
    """Whether `value` is an array or tensor; numpy's scalars are not."""
    return hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, np.generic | type)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (_is_array(value) and value.ndim == 0)


def _refuse_rows(array: Any) -> None:
    if array.ndim > 1:
        bound = "of one dimension: the token ids of one prompt"
        hint = "Rows of a padded batch would be sampled with their padding: give a list of prompts."
        raise RequestError.for_field("prompts", f"an array of shape {tuple(array.shape)}", bound, hint)


def _as_int(token_id: Any, field: str) -> int:
    number = plain(token_id)
    if type(number) is not int:
        raise RequestError.for_field(field, token_id, "an int, a token id")
    return number


def _check_text(fields: dict[str, Any], key: str, bound: str) -> None:
    if key in fields and not isinstance(fields[key], str):
        raise RequestError.for_field(key, fields[key], bound)


def _unknown_key(key: str, fields: dict[str, Any]) -> str:
    has_prompt = any(kind in fields for kind in PROMPT_KINDS)
    hint = " Other columns of a dataset go to rollout(..., columns={...})." if has_prompt else ""
    if key in ("image", "images", "picture"):
        hint = " Pictures are parts of messages, or 'multi_modal_data': {'image': [...]}."
    return peer_option(_PEERS, key) or unknown_name("prompt key", key, PROMPT_KEYS) + hint


def _unknown_argument(name: str, verb: Callable[..., Any], known: Sequence[str]) -> str:
    unknown = f"'{name}' is not an argument of {verb.__name__}:"
    own = [key for key, each in inspect.signature(verb).parameters.items() if each.kind != each.VAR_KEYWORD]
    pools = verb.__name__ in _POOLING_VERBS
    if pools and name in PoolingParams.__struct_fields__:
        where = "give" if "pooling_params" in own else "call encode, and give"
        return f"{unknown} {where} pooling_params=PoolingParams({name}=...)."
    if not pools and name in SamplingParams.__struct_fields__:
        return f"{unknown} give sampling_params=SamplingParams({name}=...)."
    if name in EngineConfig.__struct_fields__:
        return f"{unknown} it is an option of the engine, given when that is made."
    peers = peer_option(CALL_PEERS, name) or peer_option(POOLING_PEERS if pools else SAMPLING_PEERS, name)
    return peers or unknown_name(f"argument of {verb.__name__}", name, [*own, *known])


def _not_a_prompt(value: Any) -> RequestError:
    kinds = (
        "a str, a list of token ids, a conversation (a list of messages), a dictionary (prompt, prompt_token_ids or "
        "messages), or a list of these"
    )
    return RequestError.for_field("prompt", value, kinds)
