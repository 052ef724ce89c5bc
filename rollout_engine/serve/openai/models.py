"""GET /v1/models, and the tokenizer as routes."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pooling_params import supported_tasks
from rollout_engine.serve.prompt_bounds import check_text_size
from rollout_engine.serve.request_templates import chat_options, with_rendered_text
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


async def list_models(served: Served, asked: Asked) -> Reply:
    """The model that is served, with its longest sequence, the kinds of requests that it serves, and its adapters."""
    info = served.engine.frontend.client.info
    model: dict[str, Any] = {
        "id": served.model,
        "object": "model",
        "created": served.started,
        "owned_by": "rollout-engine",
        "root": info.config.model,
        "parent": None,
        "max_model_len": served.max_model_len,
        "weight_version": served.weight_version,
        "tasks": supported_tasks(info.generates, info.pooling),
        "permission": [],
    }
    adapters = [model | {"id": each.name, "parent": served.model} for each in await served.engine.list_loras()]
    return Reply({"object": "list", "data": [model, *adapters]})


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


async def tokenize(served: Served, asked: Asked) -> Reply:
    """Token ids of a text, or of a conversation by the chat template."""
    body: TokenizeBody = asked.body
    served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError.for_field("prompt", body.prompt, "a text, or messages= in its place: one of them")
    prompt: dict[str, Any] = {"messages": body.messages, **chat_options(body)}
    if body.prompt is not None:
        prompt = {"prompt": body.prompt}
        if body.add_special_tokens is not None:
            prompt["add_special_tokens"] = body.add_special_tokens
    prompt = await with_rendered_text(served, prompt)
    check_text_size(served, prompt)
    token_ids = await asked.read_texts(served.engine.frontend.inputs.token_ids_of, prompt)
    texts = await asked.read_texts(served.codec.hf.convert_ids_to_tokens, token_ids) if body.return_token_strs else None
    count = {"count": len(token_ids), "max_model_len": served.max_model_len}
    return Reply({**count, "tokens": token_ids, "token_strs": texts})


async def detokenize(
    served: Served, asked: Asked, *, tokens: list[int], model: str | None = None, skip_special_tokens: bool = False
) -> Reply:
    """Text of token ids."""
    served.check_model(model)
    return Reply({"prompt": await asked.read_texts(_decode, served, tokens, skip_special_tokens)})


def _decode(served: Served, token_ids: list[int], skips_special: bool) -> str:
    size = served.engine.frontend.client.info.vocab_size
    wrong = next((each for each in token_ids if not 0 <= each < size), None)
    if wrong is not None:
        raise RequestError.for_field("tokens", wrong, f"token ids from 0 to {size - 1}")
    special = set(served.codec.hf.all_special_ids) if skips_special else set()
    return served.codec.decode([each for each in token_ids if each not in special])


async def tokenizer_info(served: Served, asked: Asked) -> Reply:
    """The tokenizer's special tokens and chat template, for clients that encode by themselves."""
    hf = served.codec.hf
    return Reply(
        {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": len(hf),
            "model_max_length": served.max_model_len,
            "chat_template": hf.chat_template,
            "eos_token": hf.eos_token,
            "bos_token": hf.bos_token,
            "pad_token": hf.pad_token,
            "unk_token": hf.unk_token,
            "eos_token_id": hf.eos_token_id,
            "additional_special_tokens": list(map(str, hf.all_special_tokens)),
        }
    )
