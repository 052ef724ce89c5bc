"""Outputs in the shapes that SGLang's clients read."""

import base64
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.openai.logprobs import values_of
from rollout_engine.serve.openai.shapes import matched_stop, of_versions, weight_versions
from rollout_engine.serve.served import Served
from rollout_engine.serve.sglang.sampling import Wanted

Entry: TypeAlias = list[Any]
"""[log-prob or null, token id, text or null]."""


def answer(
    served: Served,
    name: str,
    output: RequestOutput,
    sample: CompletionOutput,
    wanted: Wanted,
    *,
    texts: bool,
    prompt_scores: np.ndarray | None = None,
) -> dict[str, Any]:
    """One sample so far: `text`, `output_ids` and `meta_info`.

    `texts`: whether log-probs include tokens' texts. `prompt_scores`: float32 [tokens, ids], those of the wanted ids at
    the prompt's places from `wanted.logprob_start` on, the first token of a prompt excepted.
    """
    versions = of_versions(sample, served.weight_version)
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": _finish_reason(sample),
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "weight_version": served.versions.text_of(versions["weight_version"]),
        "weight_versions": weight_versions(served, sample),
        "seed": sample.seed,
    }
    if output.metrics is not None and output.metrics.finished_time is not None:
        meta["e2e_latency"] = output.metrics.finished_time - output.metrics.arrival_time
    if sample.routed_experts is not None:
        routed = sample.routed_experts.astype("<i4")  # most of SGLang's clients support no other type
        meta["routed_experts"] = base64.b64encode(routed.tobytes()).decode("ascii")
        meta["routed_experts_shape"] = sample.routed_experts.shape
    if sample.entropies is not None:
        meta["output_token_entropy"] = sample.entropies.tolist()
    if sample.hidden_states is not None:
        meta["hidden_states"] = _states(output, sample)
    if wanted.logprobs:
        meta |= _Logprobs(served, wanted, texts).fields(output, sample)
        if prompt_scores is not None:
            meta["input_token_ids_logprobs"] = _Logprobs(served, wanted, texts).prompt_rows(prompt_scores)
    return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": meta, **versions}


def without_tokens(sample: CompletionOutput) -> CompletionOutput:
    """A sample of a request that asked for none: its token is left out."""
    top, by_id, routed = sample.top_logprobs, sample.token_id_logprobs, sample.routed_experts
    return msgspec.structs.replace(
        sample,
        text="",
        token_ids=[],
        logprobs=None if sample.logprobs is None else sample.logprobs[:0],
        top_logprobs=None if top is None else (top[0][:0], top[1][:0]),
        token_id_logprobs=None if by_id is None else by_id[:0],
        finish_reason="length" if sample.finish_reason == "stop" else sample.finish_reason,
        version_spans=[],
        entropies=None if sample.entropies is None else sample.entropies[:0],
        routed_experts=None if routed is None else routed[:-1],  # without the prompt's last token
        forced=None,
    )


class _Logprobs:
    """The log-probs of one sample."""

    def __init__(self, served: Served, wanted: Wanted, texts: bool) -> None:
        self._served, self._wanted, self._texts = served, wanted, texts

    def fields(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        assert sample.logprobs is not None
        start, wanted = self._wanted.logprob_start, self._wanted
        made: dict[str, Any] = {
            "output_token_logprobs": self._entries(values_of(sample.logprobs), sample.token_ids),
            "input_token_logprobs": [],
        }
        if wanted.prompt and output.prompt_logprobs is not None:
            values: list[Any] = values_of(output.prompt_logprobs[start:])
            if start == 0:
                values[0] = None
            made["input_token_logprobs"] = self._entries(values, output.prompt_token_ids[start:])
        if wanted.num_top:
            made["output_top_logprobs"] = self._rows(sample.top_logprobs, 0)
            if wanted.prompt:
                made["input_top_logprobs"] = self._rows(output.prompt_top_logprobs, start)
        if wanted.token_ids and sample.token_id_logprobs is not None:
            rows = values_of(sample.token_id_logprobs)
            made["output_token_ids_logprobs"] = [self._entries(row, wanted.token_ids) for row in rows]
        return made

    def prompt_rows(self, scores: np.ndarray) -> list[list[Entry] | None]:
        """Log-probs of the wanted ids at the prompt's places; None for the first token of a prompt."""
        rows: list[list[Entry] | None] = [None] if self._wanted.logprob_start == 0 else []
        return rows + [self._entries(row, self._wanted.token_ids) for row in values_of(scores)]

    def _entries(self, values: Sequence[Any], token_ids: Sequence[int]) -> list[Entry]:
        return [[value, i, self._text(i)] for value, i in zip(values, token_ids, strict=True)]

    def _rows(self, top: tuple[np.ndarray, np.ndarray] | None, start: int) -> list[list[Entry] | None]:
        if top is None:
            return []
        ids, values = top[0][start:].tolist(), values_of(top[1][start:])
        return [
            self._entries(row, row_ids) if row_ids[0] >= 0 else None for row, row_ids in zip(values, ids, strict=True)
        ]

    def _text(self, token_id: int) -> str | None:
        return self._served.token_texts[token_id] if self._texts else None


def _states(output: RequestOutput, sample: CompletionOutput) -> list[Any]:
    """One entry for each sampled token, the states computed to draw it: first all of the prompt's, then one each."""
    assert sample.hidden_states is not None
    states: list[Any] = sample.hidden_states.tolist()
    if output.prompt_hidden_states is not None:
        states[0] = output.prompt_hidden_states.tolist()
    return states


def _finish_reason(sample: CompletionOutput) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": matched_stop(sample)}
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case _:
            return {"type": "abort", "message": sample.error or "Aborted: send the tokens so far again to go on."}
