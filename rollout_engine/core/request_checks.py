"""Checks of a request in the core: each request can be computed, or is refused."""

from typing import NoReturn

from rollout_engine.base.errors import RequestError, check_text_size
from rollout_engine.base.hidden_states import check_hidden_asked
from rollout_engine.base.messages import MAX_CACHE_SALT_BYTES, EngineCoreRequest
from rollout_engine.base.pooling_params import check_generation, check_pooling
from rollout_engine.base.routed_experts import check_routing_asked
from rollout_engine.base.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_N, MAX_STOP_TOKEN_IDS
from rollout_engine.base.support import check_num_support_ids
from rollout_engine.core.config import CoreConfig

_MAX_SPELLINGS = 2 * MAX_BAD_WORDS
_MAX_SPELLING_TOKENS = 4 * (MAX_BAD_WORD_CHARS + 1)
"""A token for every byte of a word and of the space before it."""


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
    check_text_size("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
    check_text_size("lora", request.lora, MAX_CACHE_SALT_BYTES)
    _check_count("eos_token_ids", len(request.eos_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    if min(request.eos_token_ids, default=0) < 0:  # those past the vocabulary are never drawn
        raise RequestError.for_field("eos_token_ids", request.eos_token_ids, "token ids >= 0")
    _check_bad_words(request.bad_words, config.vocab_size)
    _check_output(request, config.vocab_size)
    _check_length(request, config)
    if request.pooling is None:
        check_generation(config.generates)
    else:
        check_pooling(request.pooling, config.pooling, len(request.prompt_token_ids))
    if request.params.kv_hint == "prefetch" and not config.has_tier:
        bound = "None, 'keep' or 'drop' for an engine without a kv_connector, from which KV could be fetched"
        raise RequestError.for_field("kv_hint", "prefetch", bound)
    check_routing_asked(request.params.return_routed_experts, config.routing)
    if request.pictures:
        _check_pictures(request, config)
    check_hidden_asked(request.params, config.pooling, len(request.prompt_token_ids), request.max_tokens)
    if request.thinking is not None:
        _check_tokens("thinking.closing", request.thinking.closing, config.vocab_size)
        if problem := request.thinking.problem():
            raise RequestError.for_field("thinking", problem, "a budget that fits its tags")
    request.params.check_num_logprobs(len(request.prompt_token_ids), request.max_tokens, config.vocab_size)
    check_num_support_ids(request.params, request.max_tokens, config.vocab_size)


def _check_output(request: EngineCoreRequest, vocab_size: int) -> None:
    if not request.output_token_ids:
        return
    _check_tokens("output_token_ids", request.output_token_ids, vocab_size)
    if request.params.n != 1:
        raise RequestError.for_field("n", request.params.n, "1 with output_token_ids")
    if request.params.prompt_logprobs is not None:
        raise RequestError.for_field("prompt_logprobs", request.params.prompt_logprobs, "None with output_token_ids")
    if request.params.return_hidden_states == "all":
        raise RequestError.for_field("return_hidden_states", "all", "None or 'sampled' with output_token_ids")
    num_output_tokens = len(request.output_token_ids)
    if num_output_tokens >= request.max_tokens:
        bound = f"fewer than max_tokens={request.max_tokens}"
        raise RequestError.for_field("output_token_ids", f"{num_output_tokens} tokens", bound)


def _check_pictures(request: EngineCoreRequest, config: CoreConfig) -> None:
    pictures, info = request.pictures, config.pictures
    what = f"{len(pictures)} pictures"
    if info is None or info.unsupported_reason:
        hint = "This engine's model has no vision tower." if info is None else info.unsupported_reason
        raise RequestError.for_field("pictures", what, "none", hint)
    if len(pictures) > config.max_prompt_pictures:
        raise RequestError.for_field("pictures", what, f"at most {config.max_prompt_pictures} (max_prompt_pictures)")
    end, prompt = 0, request.prompt_token_ids
    for index, placed in enumerate(pictures):
        if not end <= placed.start < placed.end <= len(prompt):
            bound = f"within [{end}, {len(prompt)}], behind the picture before and inside the prompt"
            raise RequestError.for_field(f"pictures[{index}]", (placed.start, placed.end), bound)
        if info.attention != "causal" and index and placed.start == end:
            bound = f"behind {end}: this model takes pictures without a token between them for one"
            raise RequestError.for_field(f"pictures[{index}]", (placed.start, placed.end), bound)
        end = placed.end
        if prompt[placed.start] != info.image_token_id or prompt[end - 1] != info.image_token_id:
            bound = f"token {info.image_token_id}, the placeholder of pictures, at both ends of its span"
            raise RequestError.for_field(f"pictures[{index}]", (placed.start, end), bound)
        picture = placed.picture
        if len(picture.digest) != 16 or not picture.arrays:
            found = f"a digest of {len(picture.digest)} bytes and {len(picture.arrays)} arrays"
            raise RequestError.for_field(f"pictures[{index}]", found, "a digest of 16 bytes and at least one array")


def _check_bad_words(words: list[list[int]], vocab_size: int) -> None:
    _check_count("bad_words", len(words), _MAX_SPELLINGS, "spellings")
    for word in words:
        _check_count("bad_words", len(word), _MAX_SPELLING_TOKENS, "tokens")
        _check_tokens("bad_words", word, vocab_size)
        if not word:
            raise RequestError.for_field("bad_words", word, "at least one token long")


def _check_count(field: str, count: int, most: int, kind: str) -> None:
    if count > most:
        raise RequestError.for_field(field, f"{count} {kind}", f"at most {most} {kind}")


def _check_tokens(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError.for_field(f"{field}[{position}]", token_id, f"in [0, {vocab_size}), the vocabulary")


def _check_length(request: EngineCoreRequest, config: CoreConfig) -> None:
    pools = request.pooling is not None
    if pools and (request.max_tokens or request.params.n != 1 or request.output_token_ids):
        bound = "0 with pooling, n=1 and no output_token_ids"
        raise RequestError.for_field("max_tokens", request.max_tokens, bound)
    if not pools and request.max_tokens < 1:
        raise RequestError.for_field("max_tokens", request.max_tokens, "at least 1")
    num_prompt_tokens = len(request.prompt_token_ids)
    num_tokens = num_prompt_tokens + request.max_tokens
    if num_tokens > config.max_model_len:
        _refuse_length(request, config.max_model_len - num_prompt_tokens, f"max_model_len={config.max_model_len}")
    capacity = config.num_blocks * config.block_size
    if num_tokens - (not pools) > capacity:  # the last sampled token is never fed back, so it needs no KV
        _refuse_length(request, capacity + 1 - num_prompt_tokens, f"the KV pool's {capacity} tokens (num_kv_blocks)")


def _refuse_length(request: EngineCoreRequest, room: int, limit: str) -> NoReturn:
    num_prompt_tokens = len(request.prompt_token_ids)
    if room < 1 or request.pooling is not None:
        bound = f"shorter, to stay within {limit}"
        raise RequestError.for_field("prompt_token_ids", f"{num_prompt_tokens} tokens", bound)
    hint = f"The prompt has {num_prompt_tokens} tokens; both together must stay within {limit}."
    raise RequestError.for_field("max_tokens", request.max_tokens, f"at most {room}", hint)
