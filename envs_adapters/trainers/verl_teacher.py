"""Requests of verl's distillation teachers, as the server's vLLM route takes them, and answers in verl's form.

verl asks a teacher to generate one token, and means the log-probs of the prompt:

    prompt_logprobs=k              of its k most likely tokens at each place; 0: of the prompt's own
    prompt_logprob_token_ids=ids   of these ids, from prompt_logprob_start on
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_IDS, _START, _TOP = "prompt_logprob_token_ids", "prompt_logprob_start", "prompt_logprobs"


def is_scoring(sampling_params: Mapping[str, Any]) -> bool:
    """Whether a request of verl's asks for log-probs of its prompt."""
    return any(sampling_params.get(name) is not None for name in (_IDS, _TOP))


def scoring_body(prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """The request of POST /inference/v1/generate."""
    asked = {name: sampling_params[name] for name in (_IDS, _START, _TOP) if sampling_params.get(name) is not None}
    params = asked | {"max_tokens": 1, "temperature": sampling_params.get("temperature", 1.0)}
    return {"token_ids": [int(each) for each in prompt_ids], "sampling_params": params, "request_id": request_id}


def scored_fields(
    answer: Mapping[str, Any], prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that verl reads: `prompt_ids` and `prompt_logprobs`, one row for each token of the prompt.

    Row i is of token i + 1, and the last row is of zeros. `sampled_prompt_ids` and `sampled_prompt_logprobs` have the
    prompt's own tokens. With ids also `prompt_token_id_logprobs`: these, and rows of their log-probs.
    """
    fields: dict[str, Any] = {}
    num_top = sampling_params.get(_TOP)
    if num_top is not None:
        rows = [_top_row(row, int(token), num_top) for row, token in zip(answer[_TOP][1:], prompt_ids[1:], strict=True)]
        width = max(num_top, 1)
        fields["prompt_ids"] = [ids for ids, _, _ in rows] + [[0] * width]
        fields["prompt_logprobs"] = [values for _, values, _ in rows] + [[0.0] * width]
        fields["sampled_prompt_ids"] = [[int(token)] for token in prompt_ids[1:]] + [[0]]
        fields["sampled_prompt_logprobs"] = [[own] for _, _, own in rows] + [[0.0]]
    ids = sampling_params.get(_IDS)
    if ids is not None:
        matrix = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])), allow_pickle=False)
        fields["prompt_token_id_logprobs"] = {"token_ids": ids, "logprobs": matrix.tolist()}
    return fields


def _top_row(row: Mapping[str, Any], token: int, num_top: int) -> tuple[list[int], list[float], float]:
    """Ids and log-probs of the most likely tokens of one place, by rank, and the log-prob of the prompt's own."""
    own = row[str(token)]["logprob"]
    if num_top == 0:
        return [token], [own], own
    by_rank = sorted((entry["rank"], int(each), entry["logprob"]) for each, entry in row.items())[:num_top]
    return [each for _, each, _ in by_rank], [value for _, _, value in by_rank], own
