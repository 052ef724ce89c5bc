"""The tokens of a prompt that is pooled: truncated, and as transformers reads them."""

from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams, check_pooling
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.text.prompts import truncated

NOTHING_SAMPLED = SamplingParams(detokenize=False, output_kind="final_only", speculation=False)
"""Sampling settings of requests that pool."""


def pooled_tokens(
    token_ids: list[int], params: PoolingParams, info: PoolingInfo | None, max_model_len: int
) -> list[int]:
    """The tokens to compute. Raises `RequestError` if the model cannot pool them so.

    A head for sequences is read at the last token that is not the pad token, as transformers does: later ones are
    dropped. If all are pad tokens it is read at the first.
    """
    most = max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    token_ids = truncated(token_ids, most, params.truncation_side)
    if not token_ids:
        raise RequestError.for_field("prompt", token_ids, "at least one token long", "It is empty.")
    if len(token_ids) > max_model_len:
        bound = f"at most max_model_len={max_model_len} tokens"
        raise RequestError.for_field(
            "prompt", f"{len(token_ids)} tokens", bound, "truncate_prompt_tokens=-1 keeps what fits of its end."
        )
    check_pooling(params, info, len(token_ids))
    assert info is not None, "checked"
    if params.uses_head and info.head == "sequence" and params.step_token_ids is None:
        return _without_pads(token_ids, info.pad_token_id)
    return token_ids


def closed_conversation(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a prompt to pool: the header of a next message is not added, unless it is asked for."""
    opens = fields.get("add_generation_prompt")
    return {**fields, "add_generation_prompt": bool(opens)} if "messages" in fields else fields


def _without_pads(token_ids: list[int], pad_token_id: int | None) -> list[int]:
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad_token_id:
        end -= 1
    return token_ids[:end]
