"""POST /get_sequence_logprobs: a teacher's most likely tokens at the places of completions, as of `trl vllm-serve`."""

import base64
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


class SequenceLogprobsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    sequences: list[list[int]]
    """Token ids of each prompt and its completion."""
    prompt_lengths: list[int]
    top_logprobs: int = 100
    temperature: float = 1.0
    response_format: Literal["json", "binary"] = "json"
    """"json": nested lists, in which a token of the completion that is not among the most likely stands behind them;
    "binary": arrays in base64, padded to the longest completion, and those of its own tokens apart."""


async def score_sequences(served: Served, asked: Asked) -> Reply:
    """The most likely tokens, and a completion's own, at each of its places, by a teacher that samples nothing."""
    body: SequenceLogprobsBody = asked.body
    prompts, completions = _pairs(body)
    width = min(body.top_logprobs, served.engine.frontend.client.info.vocab_size)
    num = sum(map(len, completions))
    if num * width > MAX_PROMPT_LOGPROB_VALUES:
        hint = "Send fewer sequences a call."
        bound = f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs a call"
        raise RequestError.for_field("top_logprobs", f"{width} for {num} tokens", bound, hint)
    scores = await served.engine.score_candidates(prompts, completions, top_k=width, temperature=body.temperature)
    if body.response_format == "json":
        return Reply(_as_lists(scores, completions))
    return Reply(_as_arrays(scores, completions))


def _pairs(body: SequenceLogprobsBody) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions. A prompt has one token at least: the first of a sequence has no log-prob."""
    if len(body.prompt_lengths) != len(body.sequences):
        bound = f"one for each of {len(body.sequences)} sequences"
        raise RequestError.for_field("prompt_lengths", f"a list of {len(body.prompt_lengths)}", bound)
    if body.top_logprobs < 1:
        raise RequestError.for_field("top_logprobs", body.top_logprobs, "at least 1")
    for index, (sequence, length) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
        if not 1 <= length <= len(sequence):
            bound = f"from 1 to {len(sequence)}, the tokens of its sequence"
            raise RequestError.for_field(f"prompt_lengths[{index}]", length, bound)
    divided = list(zip(body.sequences, body.prompt_lengths, strict=True))
    return [ids[:length] for ids, length in divided], [ids[length:] for ids, length in divided]


def _as_lists(scores: TokenScores, completions: Sequence[list[int]]) -> dict[str, Any]:
    assert scores.top_ids is not None and scores.top_logprobs is not None
    ids, values = [], []
    own = (token for completion in completions for token in completion)
    columns = scores.top_ids.tolist(), scores.top_logprobs.tolist(), scores.logprobs.tolist()
    for token, top, listed, value in zip(own, *columns, strict=True):
        is_listed = token in top
        ids.append(top if is_listed else [*top, token])
        shown = listed if is_listed else [*listed, value]
        values.append([None if math.isnan(each) else each for each in shown])
    ends = np.cumsum([len(completion) for completion in completions]).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    return {
        "logprobs": [values[start:end] for start, end in spans],
        "logprob_token_ids": [ids[start:end] for start, end in spans],
    }


def _as_arrays(scores: TokenScores, completions: Sequence[list[int]]) -> dict[str, Any]:
    assert scores.top_ids is not None and scores.top_logprobs is not None
    lengths = [len(completion) for completion in completions]
    own = np.array([token for completion in completions for token in completion], np.int32)
    shape = len(lengths), max(lengths, default=0)
    real = np.arange(shape[1]) < np.array(lengths)[:, None]

    def encode_padded(values: np.ndarray, fill: float) -> str:
        made = np.full((*shape, *values.shape[1:]), fill, values.dtype)
        made[real] = values
        return base64.b64encode(made.tobytes()).decode("ascii")

    return {
        "logprobs_b64": encode_padded(_without_nan(scores.top_logprobs), -np.inf),
        "token_ids_b64": encode_padded(scores.top_ids, 0),
        "actual_logprobs_b64": encode_padded(_without_nan(scores.logprobs)[:, None], -np.inf),
        "actual_token_ids_b64": encode_padded(own[:, None], 0),
        "shape": [*shape, scores.top_ids.shape[1]],
        "completion_lengths": lengths,
    }


def _without_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.float32(-np.inf), values)
