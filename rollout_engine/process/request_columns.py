"""Long lists of a request as arrays next to it, so that their length costs no time in decoding: both ways in one file.

Only the lists that a request may have by the thousand: its prompt, the tokens it has already, `allowed_token_ids` and
`bad_words`.
"""

from itertools import accumulate, pairwise

import msgspec
import numpy as np

from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.children.failure import WireError
from rollout_engine.process.wire import AddRequest, Limits, MessageTooLongError

_LONG = 4096
"""Shorter lists stay in the request."""
_PROMPT, _OUTPUT, _ALLOWED = "prompt_token_ids", "output_token_ids", "allowed_token_ids"
_WORDS, _WORD_LENGTHS = "bad_words", "bad_word_lengths"
_TOKEN_BYTES, _TOP_BYTES = 8, 8
"""Bytes of a prompt token's log-prob and rank, and of the id and log-prob of each of the likely ones at its place."""
_STEP_BYTES = 1 << 16
"""Bytes for the rest of the message, about."""


def with_columns(request: EngineCoreRequest) -> AddRequest:
    """Make the message that adds a request. Raises `OverflowError` for token ids of more than 32 bits."""
    columns: dict[str, np.ndarray] = {}
    params, prompt, words = request.params, request.prompt_token_ids, request.bad_words
    allowed, output = params.allowed_token_ids, request.output_token_ids
    if len(prompt) > _LONG:
        columns[_PROMPT], prompt = np.array(prompt, np.int32), []
    if len(output) > _LONG:
        columns[_OUTPUT], output = np.array(output, np.int32), []
    if allowed is not None and len(allowed) > _LONG:
        columns[_ALLOWED], allowed = np.array(allowed, np.int32), []
    if sum(map(len, words)) > _LONG:
        columns[_WORDS] = np.array([token_id for word in words for token_id in word], np.int32)
        columns[_WORD_LENGTHS] = np.array([len(word) for word in words], np.int32)
        words = []
    if params.bad_words or columns:  # the core reads the words' token ids
        params = msgspec.structs.replace(params, bad_words=None, allowed_token_ids=allowed)
        lists = dict(prompt_token_ids=prompt, output_token_ids=output, bad_words=words)
        request = msgspec.structs.replace(request, params=params, **lists)
    return AddRequest(request, columns)


def request_of(message: AddRequest) -> EngineCoreRequest:
    """Return the request of a message, whole again. Raises `WireError` for columns that are not its own."""
    request, columns = message.request, dict(message.columns)
    if not columns:
        return request
    params, prompt, words = request.params, request.prompt_token_ids, request.bad_words
    output = request.output_token_ids
    for name, column in columns.items():
        if column.dtype != np.int32 or column.ndim != 1:
            raise WireError(f"column {name:.40}: expected int32 of one dimension, came {column.dtype} {column.shape}")
    if _PROMPT in columns:
        prompt = columns.pop(_PROMPT).tolist()
    if _OUTPUT in columns:
        output = columns.pop(_OUTPUT).tolist()
    if _ALLOWED in columns:
        params = msgspec.structs.replace(params, allowed_token_ids=columns.pop(_ALLOWED).tolist())
    if _WORDS in columns and _WORD_LENGTHS in columns:
        words = _divide(columns.pop(_WORDS).tolist(), columns.pop(_WORD_LENGTHS).tolist())
    if columns:
        raise WireError(f"unknown columns: {', '.join(columns):.80}")
    lists = dict(prompt_token_ids=prompt, output_token_ids=output, bad_words=words)
    return msgspec.structs.replace(request, params=params, **lists)


def check_answer(
    message: AddRequest, limits: Limits, vocab_size: int, num_routed_bytes: int = 0, num_hidden_bytes: int = 0
) -> None:
    """Raise `MessageTooLongError` if log-probs, routed experts or states of a prompt would not fit in one message.

    `num_routed_bytes`, `num_hidden_bytes`: bytes of one token's routed experts, and of its hidden state.
    """
    params = message.request.params
    num_tokens = len(message.request.prompt_token_ids) or len(message.columns.get(_PROMPT, ()))
    if (asked := params.prompt_logprobs) is not None:
        width = vocab_size if asked == -1 else asked
        num_bytes = num_tokens * (_TOKEN_BYTES + _TOP_BYTES * width) + _STEP_BYTES
        _check_size(f"prompt_logprobs={asked} of {num_tokens} tokens", num_bytes, limits, "ask for fewer")
    if params.return_routed_experts:
        num_bytes = num_tokens * num_routed_bytes + _STEP_BYTES
        _check_size(f"routed experts of {num_tokens} prompt tokens", num_bytes, limits, "give a shorter prompt")
    if params.return_hidden_states == "all":
        num_bytes = num_tokens * num_hidden_bytes + _STEP_BYTES
        _check_size(f"hidden states of {num_tokens} prompt tokens", num_bytes, limits, "give a shorter prompt")


def _check_size(what: str, num_bytes: int, limits: Limits, advice: str) -> None:
    if num_bytes > limits.message_bytes:
        most = limits.message_bytes
        raise MessageTooLongError(f"{what} take {num_bytes} bytes, and a message may take {most}; {advice}")


def _divide(values: list[int], lengths: list[int]) -> list[list[int]]:
    if min(lengths, default=0) < 0 or sum(lengths) != len(values):
        raise WireError("column bad_words does not have the lengths that come with it")
    return [values[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
