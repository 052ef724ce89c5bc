"""POST /v1/embeddings, /pooling and /classify: prompts in, vectors, logits or classes out."""

from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.pooling_params import PoolingInfo, PoolingKind
from rollout_engine.serve.pooling.call import (
    Encoding,
    InputFields,
    PoolingCall,
    array_of,
    encoded,
    info_of,
    input_prompts,
)
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served

_TASKS: dict[str, dict[str, Any]] = {
    "embed": {"kind": "last", "normalize": True},
    "classify": {"kind": "classify"},
    "token_embed": {"kind": "token"},
    "token_classify": {"kind": "classify"},
}
"""vLLM's names of kinds of pooling -> ours."""


class EmbeddingBody(InputFields, kw_only=True):
    """Fields of a request."""

    encoding_format: Encoding = "float"
    kind: PoolingKind = "last"
    """"last", "mean" or "cls"."""
    normalize: bool = True


async def embeddings(served: Served, asked: Asked) -> Reply:
    """Embeddings of texts, token ids or a conversation, one vector each, of length 1."""
    body: EmbeddingBody = asked.body
    call = PoolingCall(served, asked, "embd")
    if body.kind not in ("last", "mean", "cls"):
        raise RequestError.for_field("kind", body.kind, "one of 'last', 'mean', 'cls'", "Other kinds go to /pooling.")
    outputs = await call.results(input_prompts(body), kind=body.kind, normalize=body.normalize)
    data = [
        {"index": i, "object": "embedding", "embedding": encoded(output, body.encoding_format)}
        for i, output in enumerate(outputs)
    ]
    return Reply(call.response(outputs, data))


class PoolingBody(InputFields, kw_only=True):
    """Fields of a request."""

    encoding_format: Encoding = "float"
    task: str | None = None
    """vLLM's name of the kind of pooling, in place of `kind`."""
    kind: PoolingKind | None = None
    """As in `PoolingParams`. Neither: the head's outputs, or the hidden state of every token."""
    normalize: bool = False
    step_token_ids: list[int] | None = None


async def pooling(served: Served, asked: Asked) -> Reply:
    """Hidden states, logits or rewards of prompts: any kind of `PoolingParams`."""
    body: PoolingBody = asked.body
    call = PoolingCall(served, asked, "pool")
    outputs = await call.results(input_prompts(body), **_params(body, info_of(served)))
    data = [
        {"index": i, "object": "pooling", "data": encoded(output, body.encoding_format)}
        for i, output in enumerate(outputs)
    ]
    return Reply(call.response(outputs, data))


class ClassifyBody(InputFields, kw_only=True):
    """Fields of a request."""

    use_activation: bool = True
    """Probabilities; False: logits."""


async def classify(served: Served, asked: Asked) -> Reply:
    """Classes of prompts by the checkpoint's head for sequences, with the probability of each."""
    call, info = PoolingCall(served, asked, "classify"), info_of(served)
    if info.head == "token":
        hint = "Its head is for tokens: use /pooling."
        raise RequestError.for_field("model", served.model, "one with a head for sequences", hint)
    outputs = await call.results(input_prompts(asked.body), kind="classify")
    data = [_class(i, output, info, asked.body.use_activation) for i, output in enumerate(outputs)]
    return Reply(call.response(outputs, data))


def probabilities(logits: np.ndarray, info: PoolingInfo) -> np.ndarray:
    """Sigmoid of logits [L] if labels do not exclude one another, or there is only one; else softmax."""
    wide = logits.astype(np.float64)
    if info.is_multi_label or len(info.labels) == 1:
        return 0.5 * (1.0 + np.tanh(0.5 * wide))
    powers = np.exp(wide - wide.max())
    return np.asarray(powers / powers.sum())


def _class(index: int, output: RequestOutput, info: PoolingInfo, activates: bool) -> dict[str, Any]:
    logits = array_of(output)
    values = probabilities(logits, info) if activates else logits
    label = info.labels[int(np.argmax(logits))]
    return {"index": index, "label": label, "probs": values.tolist(), "num_classes": len(info.labels)}


def _params(body: PoolingBody, info: PoolingInfo) -> dict[str, Any]:
    more = {"step_token_ids": body.step_token_ids, "normalize": body.normalize}
    if body.task is not None:
        if body.task not in _TASKS or body.kind is not None:
            bound = f"one of {', '.join(map(repr, _TASKS))}, without kind"
            raise RequestError.for_field("task", body.task, bound)
        return more | _TASKS[body.task]
    return more | {"kind": body.kind or ("token" if info.head is None else "classify")}
