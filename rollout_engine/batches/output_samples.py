"""Samples of a finished prompt as the dicts of `rollout_engine.batches.jsonl`, without a TensorDict in between."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.support import support_of
from rollout_engine.batches.picture_files import as_entries
from rollout_engine.batches.sampled_columns import top_of, top_rows


def output_samples(
    output: RequestOutput,
    group_id: int,
    columns: Mapping[str, Any],
    rewards: list[float] | None,
    function_rewards: Mapping[str, list[float | None]],
) -> Iterator[dict[str, Any]]:
    """One dict per sample, equal to that of `samples(rollout_batch([output], ...))`.

    `columns`: name -> the prompt's value; `rewards` one per sample, `function_rewards` the same by function's name.
    Raises `RequestError` for samples without log-probs.
    """
    has_budget = any(sample.forced is not None for sample in output.outputs)
    has_mass = any(sample.kept_logprob_mass is not None for sample in output.outputs)
    has_support = any(sample.support is not None for sample in output.outputs)
    has_entropies = any(sample.entropies is not None for sample in output.outputs)
    has_top = any(top_of(sample) is not None for sample in output.outputs)
    prompt_token_ids = [int(token_id) for token_id in output.prompt_token_ids]
    for row, sample in enumerate(output.outputs):
        if sample.logprobs is None and sample.token_ids:
            raise RequestError.for_field("logprobs", None, "set for rollouts", "logprobs=0 is cheap.")
        is_done = sample.finish_reason == "stop"
        made: dict[str, Any] = {
            "group_id": group_id,
            "sample_index": sample.index,
            "seed": sample.seed,
            "finish_reason": sample.finish_reason,
            "truncated": not is_done,
            "prompt": output.prompt,
            "response": sample.text,
            "prompt_token_ids": prompt_token_ids,
            "response_token_ids": list(sample.token_ids),
            "log_probs": _floats(sample.logprobs, sample),
        }
        if output.pictures:
            made["pictures"] = as_entries(output.pictures)
        spans = [(span.end - span.start, span.policy_version, span.kv_min_version) for span in sample.version_spans]
        made["policy_version"] = [version for length, version, _ in spans for _ in range(length)]
        made["kv_min_version"] = [version for length, _, version in spans for _ in range(length)]
        if has_budget:
            made["forced"] = [False] * len(sample.token_ids) if sample.forced is None else sample.forced.tolist()
        if has_mass:
            made["kept_logprob_mass"] = _floats(sample.kept_logprob_mass, sample)
        if has_support:
            made["support"] = support_of(sample).lists()
        if has_entropies:
            made["entropy"] = _floats(sample.entropies, sample)
        if has_top:
            top = top_of(sample)
            made["top_k"] = [[] for _ in sample.token_ids] if top is None else top_rows(*top)
        if rewards is not None:
            made |= {"reward": _float32(rewards[row]), "done": is_done}
        if function_rewards:
            each = {name: values[row] for name, values in function_rewards.items()}
            made["rewards"] = {name: None if value is None else _float32(value) for name, value in each.items()}
        made["columns"] = dict(columns)
        yield made


def _floats(values: np.ndarray | None, sample: CompletionOutput) -> list[float]:
    found: list[float] = [0.0] * len(sample.token_ids) if values is None else np.asarray(values, np.float32).tolist()
    return found


def _float32(value: float) -> float:
    return float(np.float32(value))
