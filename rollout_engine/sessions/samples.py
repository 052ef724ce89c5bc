"""Samples of answers: deltas of a stream joined, and the memory that they take."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from rollout_engine.sessions.memory import BYTES_OF_ID

_COLUMNS = (
    *("logprobs", "kept_logprob_mass", "sampled_ranks", "token_id_logprobs", "routed_experts", "entropies"),
    *("hidden_states", "forced"),
)


def join_parts(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    """One sample of the outputs of a stream that holds the new part in each; of one output, itself."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {name: _join([getattr(part, name) for part in parts]) for name in _COLUMNS}
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    supports = [part.support for part in parts if part.support is not None]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[each for part in parts for each in part.token_ids],
        top_logprobs=None if not tops else (np.concatenate([i for i, _ in tops]), np.concatenate([p for _, p in tops])),
        support=None if not supports else _join_supports(supports),
        version_spans=_join_spans(parts),
        **joined,
    )


def bytes_of(sample: CompletionOutput) -> int:
    """Approximate memory of a sample."""
    arrays = [getattr(sample, name) for name in _COLUMNS]
    for pair in (sample.top_logprobs, sample.support):
        arrays += pair or ()
    size = sum(int(each.nbytes) for each in arrays if each is not None)
    return size + BYTES_OF_ID * len(sample.token_ids) + len(sample.text)


def _join(parts: list[np.ndarray | None]) -> np.ndarray | None:
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None


def _join_supports(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *(len(ids) for _, ids in parts)])
    offsets = [part[0][1:] + start for part, start in zip(parts, starts, strict=False)]
    first = np.zeros(1, parts[0][0].dtype)
    return np.concatenate([first, *offsets]), np.concatenate([ids for _, ids in parts])


def _join_spans(parts: Sequence[CompletionOutput]) -> list[VersionSpan]:
    """Spans of the parts, which count from the sample's start; neighbours of equal versions are one."""
    spans: list[VersionSpan] = []
    for span in (each for part in parts for each in part.version_spans):
        if spans and _continues(spans[-1], span):
            spans[-1] = msgspec.structs.replace(spans[-1], end=span.end)
        else:
            spans.append(span)
    return spans


def _continues(last: VersionSpan, span: VersionSpan) -> bool:
    versions = last.policy_version, last.kv_min_version
    return last.end == span.start and versions == (span.policy_version, span.kv_min_version)
