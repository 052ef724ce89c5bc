"""POST /score and /rerank: how well texts fit each other, by a head with one label, else by their embeddings."""

from typing import Any

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.serve.call import text_prompt
from rollout_engine.serve.pooling.call import PoolingCall, PoolingFields, array_of, info_of
from rollout_engine.serve.pooling.embeddings import probabilities
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


class ScoreBody(PoolingFields, kw_only=True):
    """Fields of a request: text_1 and text_2, under any of their names in vLLM."""

    text_1: str | list[str] | None = None
    """One text, or as many as `text_2`."""
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    use_activation: bool = True
    """Score by the sigmoid of a head's logit; False: by the logit itself."""


async def score(served: Served, asked: Asked) -> Reply:
    """Scores of pairs of texts: of a head with one label, read behind both; else the cosine of their embeddings."""
    body: ScoreBody = asked.body
    call = PoolingCall(served, asked, "score")
    firsts = _texts("text_1", body.text_1 if body.text_1 is not None else body.queries)
    seconds = _texts("text_2", body.text_2 if body.text_2 is not None else body.documents)
    names = "queries" if body.text_1 is None else "text_1", "documents" if body.text_2 is None else "text_2"
    outputs, scores = await _scores(call, served, body, firsts, seconds, names, body.use_activation)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    return Reply(call.response(outputs, data))


class RerankBody(PoolingFields, kw_only=True):
    """Fields of a request."""

    query: str
    documents: list[str]
    top_n: int = 0
    """How many to return; 0: all."""
    use_activation: bool = True


async def rerank(served: Served, asked: Asked) -> Reply:
    """Documents by how well they fit a query, the best first; scores as those of /score."""
    body: RerankBody = asked.body
    call = PoolingCall(served, asked, "rerank")
    if body.top_n < 0:
        raise RequestError.for_field("top_n", body.top_n, "at least 0")
    texts = _texts("documents", body.documents)
    outputs, scores = await _scores(
        call, served, body, [body.query], texts, ("query", "documents"), body.use_activation
    )
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    results = [{"index": i, "document": {"text": texts[i]}, "relevance_score": scores[i]} for i in order]
    about = {"id": call.head["id"], "model": call.head["model"], **call.about(outputs)}
    return Reply({**about, "results": results[: body.top_n or None]})


async def _scores(
    call: PoolingCall,
    served: Served,
    body: PoolingFields,
    firsts: list[str],
    seconds: list[str],
    fields: tuple[str, str],
    activates: bool,
) -> tuple[list[RequestOutput], list[float]]:
    """(results that were computed, the score of each pair). `fields`: of the body, that have the texts."""
    if len(firsts) not in (1, len(seconds)):
        bound = f"one text, or {len(seconds)}: one for each of the others"
        raise RequestError.for_field("text_1", f"a list of {len(firsts)}", bound)
    pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
    names = [_names(field, len(texts)) for field, texts in zip(fields, (firsts, seconds), strict=True)]
    info = info_of(served)
    if info.head == "sequence" and len(info.labels) == 1:
        both = [f"{one} and {two}" for one, two in zip(names[0] * (len(pairs) // len(firsts)), names[1], strict=True)]
        outputs = await call.results([text_prompt(one + two, body) for one, two in pairs], both, kind="reward")
        logits = [array_of(output) for output in outputs]
        return outputs, [float(probabilities(each, info)[0] if activates else each[0]) for each in logits]
    if info.head is not None:
        hint = "Its head does not give one score: use /classify or /pooling."
        raise RequestError.for_field("model", served.model, "a causal LM, or one whose head has one label", hint)
    texts = [text_prompt(text, body) for text in (*firsts, *seconds)]
    outputs = await call.results(texts, names[0] + names[1], kind="last", normalize=True)
    vectors = [array_of(output).astype(np.float64) for output in outputs]
    ours, others = vectors[: len(firsts)], vectors[len(firsts) :]
    return outputs, [float(one @ two) for one, two in zip(ours * (len(others) // len(ours)), others, strict=True)]


def _names(field: str, num_texts: int) -> list[str]:
    return [field] if num_texts == 1 else [f"{field}[{i}]" for i in range(num_texts)]


def _texts(field: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise RequestError.for_field(field, given, "a text, or a list of at least one")
    return list(texts)
