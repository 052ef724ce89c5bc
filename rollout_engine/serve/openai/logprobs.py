"""Log-probs in the shapes that clients of OpenAI's dialect read.

Values are the engine's float32, written in full, so that reading them back gives the same bits. JSON has no infinity:
the log-prob of a token that cannot be sampled is written as -9999.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.served import Served

Texts: TypeAlias = dict[int, str]
"""Token id -> its text in responses."""

_IMPOSSIBLE = -9999.0
_LOWEST = np.float32(_IMPOSSIBLE)


def values_of(logprobs: np.ndarray) -> Any:
    """float32 of any shape as a list of numbers of JSON, or a list of lists."""
    return np.maximum(logprobs, _LOWEST).tolist()


def text_logprobs(
    served: Served,
    prompt: RequestOutput | None,
    sample: CompletionOutput | None,
    offsets: list[int],
    *,
    num_top: int,
    as_ids: bool,
) -> dict[str, Any]:
    """The legacy shape of /v1/completions: columns of tokens, their log-probs, the most likely ones, and `offsets`.

    `prompt`: its tokens are first, the first of them without a log-prob. `num_top`: how many of the most likely ones
    it may show, which may have been found for more; -1: all.
    """
    texts = _texts(served, as_ids)
    tokens: list[str] = []
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    if prompt is not None and prompt.prompt_logprobs is not None:
        tokens += [texts[each] for each in prompt.prompt_token_ids]
        values += [None, *values_of(prompt.prompt_logprobs[1:])]
        likely = _first_columns(prompt.prompt_top_logprobs, num_top)
        top += [None, *_top_dicts(texts, prompt.prompt_token_ids, values, likely)[1:]]
    if sample is not None and sample.logprobs is not None:
        own = values_of(sample.logprobs)
        tokens += [texts[each] for each in sample.token_ids]
        values += own
        top += _top_dicts(texts, sample.token_ids, own, sample.top_logprobs)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(served: Served, sample: CompletionOutput, *, as_ids: bool) -> dict[str, Any]:
    """The shape of /v1/chat/completions: a list of tokens, each with the most likely ones.

    The bytes of tokens, end to end, are the text's, also if a character is divided among them.
    """
    assert sample.logprobs is not None
    texts = _texts(served, as_ids)
    bytes_of = _name_bytes if texts is _TOKEN_IDS else served.codec.bytes_of

    def entry(token_id: int, value: float) -> dict[str, Any]:
        token = texts[token_id]
        return {"token": token, "token_id": token_id, "logprob": value, "bytes": [*bytes_of(token_id)]}

    rows: list[list[tuple[int, float]]] = [[] for _ in sample.token_ids]
    if sample.top_logprobs is not None:
        ids, values = sample.top_logprobs
        rows = [
            [(i, v) for i, v in zip(row, logprobs, strict=True) if i >= 0]
            for row, logprobs in zip(ids.tolist(), values_of(values), strict=True)
        ]
    content = [
        {**entry(token_id, value), "top_logprobs": [entry(*each) for each in row]}
        for token_id, value, row in zip(sample.token_ids, values_of(sample.logprobs), rows, strict=True)
    ]
    return {"content": content}


def token_logprobs(sample: CompletionOutput, asked_ids: Sequence[int] = ()) -> dict[str, Any] | None:
    """The shape of /inference/v1/generate: a list of tokens by their ids, each with its rank and the most likely ones.

    `asked_ids`: the request's `logprob_token_ids`, which stand behind the most likely ones. None without log-probs.
    """
    if sample.logprobs is None:
        return None
    count = len(sample.token_ids)
    ranks = [None] * count if sample.sampled_ranks is None else sample.sampled_ranks.tolist()
    rows: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    if sample.top_logprobs is not None:
        ids, values = sample.top_logprobs
        rows = [
            [
                _format_token(i, v, rank)
                for rank, (i, v) in enumerate(zip(row, logprobs, strict=True), start=1)
                if i >= 0
            ]
            for row, logprobs in zip(ids.tolist(), values_of(values), strict=True)
        ]
    if sample.token_id_logprobs is not None:
        for entries, logprobs in zip(rows, values_of(sample.token_id_logprobs), strict=True):
            listed = {entry["token_id"] for entry in entries}
            entries += [_format_token(i, v, None) for i, v in zip(asked_ids, logprobs, strict=True) if i not in listed]
    content = [
        {**_format_token(token_id, value, rank), "top_logprobs": entries}
        for token_id, value, rank, entries in zip(
            sample.token_ids, values_of(sample.logprobs), ranks, rows, strict=True
        )
    ]
    return {"content": content}


def _format_token(token_id: int, value: float, rank: int | None) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": value, "rank": rank}


def _top_dicts(
    texts: Texts,
    token_ids: list[int],
    values: list[Any],
    top: tuple[np.ndarray, np.ndarray] | None,
) -> list[dict[str, float] | None]:
    """For each token the most likely ones by their texts, itself included. Of tokens with one text, the likeliest."""
    if top is None:
        return [{texts[token_id]: value} for token_id, value in zip(token_ids, values, strict=True)]
    rows: list[dict[str, float] | None] = []
    for token_id, value, ids, logprobs in zip(token_ids, values, top[0].tolist(), values_of(top[1]), strict=True):
        row: dict[str, float] = {}
        for i, v in zip(ids, logprobs, strict=True):
            if i >= 0:
                row.setdefault(texts[i], v)
        row.setdefault(texts[token_id], value)
        rows.append(row)
    return rows


def _first_columns(top: tuple[np.ndarray, np.ndarray] | None, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    if top is None or count < 0:
        return top
    return (top[0][:, :count], top[1][:, :count]) if count else None


class _TokenIds(dict[int, str]):
    def __missing__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


_TOKEN_IDS = _TokenIds()


def _name_bytes(token_id: int) -> bytes:
    return _TOKEN_IDS[token_id].encode()


def _texts(served: Served, as_ids: bool) -> Texts:
    """The text written for each token: its own, or its id if those are asked for or there is no tokenizer."""
    if as_ids or served.engine.frontend.inputs.codec is None:
        return _TOKEN_IDS
    return cast(Texts, served.token_texts)
