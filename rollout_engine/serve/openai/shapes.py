"""Parts of responses that several routes have."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.served import Served


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """End with an event that has the usage and no choice."""
    continuous_usage_stats: bool | None = None
    """Show in every event the usage so far, of all its choices together."""
    include_obfuscation: bool | None = None
    """Changes nothing: events are never padded."""

    def usage_so_far(self, usage: Callable[[], Any]) -> dict[str, Any]:
        """The field of an event that is not the last one."""
        if self.continuous_usage_stats:
            return {"usage": usage()}
        return {"usage": None} if self.include_usage else {}


def now() -> int:
    """Seconds since 1970, as "created" has them."""
    return int(time.time())


def total_usage(outputs: Sequence[RequestOutput], counts_samples: bool = True, num_sampled: int | None = None) -> Any:
    """Tokens of prompts and of samples. `num_sampled`: of streamed outputs, which hold only their last tokens."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if num_sampled is None:
        num_sampled = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    sampled = num_sampled if counts_samples else 0
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def of_versions(sample: CompletionOutput, live_version: int) -> dict[str, Any]:
    """Which weights made the tokens: `version_spans` [start, end, policy version, oldest version of the KV read].

    `weight_version` is that of the last token, or the live one if there is none yet. If spans differ, the
    weights changed on the way. `error` is why an update has ended a sample. `quantization` is present if the engine has
    one; with a budget of thinking `forced`, one bool for each token.
    """
    spans = sample.version_spans
    found = {"version_spans": spans, "weight_version": spans[-1].policy_version if spans else live_version}
    if sample.error is not None:
        found["error"] = sample.error
    if sample.quantization is not None:
        found["quantization"] = sample.quantization
    return found if sample.forced is None else found | {"forced": sample.forced.tolist()}


def sglang_metadata(served: Served, version: int) -> dict[str, Any]:
    """The version of the weights as SGLang's clients read it from whole responses."""
    return {"metadata": {"weight_version": served.versions.text_of(version)}}


def sampled_fields(sample: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
    """Our own fields of a choice, those that were asked for: `entropies`, `hidden_states`, `prompt_hidden_states`."""
    found: dict[str, Any] = {}
    if sample.entropies is not None:
        found["entropies"] = sample.entropies.tolist()
    for name, states in (
        ("hidden_states", sample.hidden_states),
        ("prompt_hidden_states", output.prompt_hidden_states),
    ):
        if states is not None:
            found[name] = array_fields(states)
    return found


def array_fields(array: np.ndarray) -> dict[str, Any]:
    """`data`: base64 of an array's bytes, row by row, little-endian; its `shape` and `dtype`."""
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")
    return {"data": data, "shape": list(array.shape), "dtype": array.dtype.name}


def routed_fields(routed_experts: np.ndarray | None, start: int) -> dict[str, Any] | None:
    """`data`: base64 of the array's bytes, row by row; `shape` and `dtype` of it, and the token that row 0 is of."""
    if routed_experts is None:
        return None
    return {**array_fields(routed_experts), "start": start}


def matched_stop(sample: CompletionOutput) -> int | str | None:
    """The match that ended a sample, as SGLang's clients read it: end token's id or stop string; None for neither."""
    if sample.finish_reason != "stop":
        return None
    if sample.stop_reason is not None:
        return sample.stop_reason
    return sample.token_ids[-1] if sample.token_ids else None


def weight_versions(served: Served, sample: CompletionOutput) -> list[dict[str, Any]]:
    """The spans as vLLM and SGLang write them: versions as texts, those that clients gave them if they did."""
    text_of = served.versions.text_of
    return [
        {"version": text_of(span.policy_version), "start": span.start, "end": span.end} for span in sample.version_spans
    ]
