"""Checks of a request in the core: each request can be computed, or is refused."""

from typing import NoReturn

from rollout_engine.core.config import CoreConfig
from rollout_engine.errors import RequestError
from rollout_engine.messages import EngineCoreRequest
from rollout_engine.sampling_params import MAX_N


def check_request(request: EngineCoreRequest, config: CoreConfig) -> None:
    """Raise `RequestError` naming field, value and bound if `request` can never be served."""
    _check_tokens("prompt_token_ids", request.prompt_token_ids, config.vocab_size)
    if not request.prompt_token_ids:
        raise RequestError.for_field("prompt_token_ids", [], "at least one token")
    if not 1 <= request.params.n <= MAX_N:
        raise RequestError.for_field("n", request.params.n, f"in [1, {MAX_N}]")
    if not 0 <= request.seed < 2**64:
        raise RequestError.for_field("seed", request.seed, "in [0, 2**64)")
    for field in ("allowed_token_ids", "logit_bias", "logprob_token_ids"):
        _check_tokens(field, list(getattr(request.params, field) or ()), config.vocab_size)
    for word in request.bad_words:
        _check_tokens("bad_words", word, config.vocab_size)
        if not word:
            raise RequestError.for_field("bad_words", word, "at least one token long")
    _check_length(request, config)
    request.params.check_num_logprobs(len(request.prompt_token_ids), request.max_tokens, config.vocab_size)


def _check_tokens(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError.for_field(f"{field}[{position}]", token_id, f"in [0, {vocab_size}), the vocabulary")


def _check_length(request: EngineCoreRequest, config: CoreConfig) -> None:
    if request.max_tokens < 1:
        raise RequestError.for_field("max_tokens", request.max_tokens, "at least 1")
    num_prompt_tokens = len(request.prompt_token_ids)
    num_tokens = num_prompt_tokens + request.max_tokens
    if num_tokens > config.max_model_len:
        _refuse_length(request, config.max_model_len - num_prompt_tokens, f"max_model_len={config.max_model_len}")
    capacity = config.num_blocks * config.block_size
    if num_tokens - 1 > capacity:  # the last token is never fed back, so it needs no KV
        _refuse_length(request, capacity + 1 - num_prompt_tokens, f"the KV pool's {capacity} tokens (num_kv_blocks)")


def _refuse_length(request: EngineCoreRequest, room: int, limit: str) -> NoReturn:
    num_prompt_tokens = len(request.prompt_token_ids)
    if room < 1:
        bound = f"shorter, to stay within {limit}"
        raise RequestError.for_field("prompt_token_ids", f"{num_prompt_tokens} tokens", bound)
    hint = f"The prompt has {num_prompt_tokens} tokens; both together must stay within {limit}."
    raise RequestError.for_field("max_tokens", request.max_tokens, f"at most {room}", hint)
