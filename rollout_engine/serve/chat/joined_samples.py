"""Whole samples of the parts in which they were streamed."""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from rollout_engine.base.outputs import CompletionOutput, RequestOutput, VersionSpan

_ARRAYS = (
    *("logprobs", "kept_logprob_mass", "sampled_ranks", "token_id_logprobs", "routed_experts", "entropies"),
    *("hidden_states", "forced"),
)
"""Columns with a row for each token, or None."""


def join_samples(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    """The sample whose parts, in their order, are those of `output_kind="delta"`."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    columns = {name: _join([getattr(part, name) for part in parts]) for name in _ARRAYS}
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    ids, values = _join([each[0] for each in tops]), _join([each[1] for each in tops])
    return structs.replace(
        last,
        text="".join([part.text for part in parts]),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        top_logprobs=None if ids is None or values is None else (ids, values),
        version_spans=_join_spans(parts),
        support=_join_supports(parts),
        **columns,
    )


def join_output(last: RequestOutput, samples: dict[int, list[CompletionOutput]]) -> RequestOutput:
    """The result whose samples were streamed in these parts. `last`: the output that ended it."""
    return structs.replace(last, outputs=[join_samples(samples[index]) for index in sorted(samples)])


def _join(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    found = [each for each in arrays if each is not None]  # a part without tokens may have none
    return np.concatenate(found) if found else None


def _join_spans(parts: Sequence[CompletionOutput]) -> list[VersionSpan]:
    joined: list[VersionSpan] = []
    for span in (each for part in parts for each in part.version_spans):
        before = joined[-1] if joined else None
        if before is not None and structs.replace(before, end=span.end) == structs.replace(span, start=before.start):
            joined[-1] = structs.replace(before, end=span.end)
        else:
            joined.append(span)
    return joined


def _join_supports(parts: Sequence[CompletionOutput]) -> tuple[np.ndarray, np.ndarray] | None:
    found = [part.support for part in parts if part.support is not None]
    if not found:
        return None
    lengths = np.concatenate([np.diff(offsets) for offsets, _ in found])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return offsets, np.concatenate([ids for _, ids in found])
