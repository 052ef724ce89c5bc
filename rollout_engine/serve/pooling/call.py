"""One call of a route that pools: its prompts, their results, and the parts that all responses have."""

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.pooling_params import PoolingInfo, PoolingParams
from rollout_engine.serve.call import CallFields, prompts_of, salt_of
from rollout_engine.serve.generation import Generation
from rollout_engine.serve.openai.shapes import now, total_usage
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.request_templates import chat_options
from rollout_engine.serve.route import Asked
from rollout_engine.serve.served import Served

Encoding: TypeAlias = Literal["float", "base64"]
IGNORED = frozenset(("user", "metadata", "safety_identifier"))
"""Fields of clients that change no result."""
PEERS: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    "softmax": (),
    "activation": (),
}
"""Fields of other servers that are not served -> the values that ask for nothing."""
_INDEX = re.compile(r"prompts\[(\d+)\]: ")


class PoolingFields(CallFields, kw_only=True):
    """Fields of every request that pools."""

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None


class InputFields(PoolingFields, kw_only=True):
    """Fields of a request with texts, token ids or a conversation."""

    input: str | list[str | int | list[int]] | None = None
    """A text, token ids, or a list of such."""
    messages: list[Any] | None = None
    """A conversation, in place of `input`."""
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def input_prompts(body: InputFields) -> list[dict[str, Any]]:
    """The prompts of a body, in our own form. Raises `RequestError` if there is none."""
    if body.messages is not None and body.input is None:
        return [{"messages": body.messages, **chat_options(body), **salt_of(body)}]
    given = body.input
    if not given or body.messages is not None:
        bound = "a text, token ids, or a list of such, not empty, or messages= in its place"
        raise RequestError.for_field("input", given, bound)
    return prompts_of(given, body)


def info_of(served: Served) -> PoolingInfo:
    """Kinds of pooling that the model offers. Raises `HttpProblem` 400 if its engine does not pool."""
    info = served.engine.frontend.client.info.pooling
    if info is None:
        raise HttpProblem(400, "This engine does not pool: its device is not a CPU.")
    return info


class PoolingCall:
    """One call. Its id begins with `kind`."""

    def __init__(self, served: Served, asked: Asked, kind: str) -> None:
        body: PoolingFields = asked.body
        self._served, self._asked, self._body = served, asked, body
        self.head = {
            "id": f"{kind}-{body.request_id or asked.request_id}",
            "object": "list",
            "created": now(),
            "model": served.model,
        }
        """Fields that begin a response."""

    async def results(self, prompts: Sequence[Any], names: Sequence[str] = (), **params: Any) -> list[RequestOutput]:
        """The results of prompts, all with these `PoolingParams`, under the adapter that the body names as its model.

        `names`: of each prompt in the body, by default input[0] and so on. Raises `RequestError`, and `HttpProblem`.
        """
        body = self._body
        lora = await self._served.adapter_of(body.model)
        self.head["model"] = lora or self._served.model
        if body.truncation_side is not None:
            params["truncation_side"] = body.truncation_side
        pooling = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, **params)
        with Generation(self._served, self._asked, body.request_id) as generation:
            with _by_names(names or [f"input[{i}]" for i in range(len(prompts))]):
                await generation.pool(prompts, pooling, priority=body.priority, session_id=body.session_id, lora=lora)
            found = await generation.results()
        for output in found:
            if output.pooled is None or output.pooled.data is None:
                raise HttpProblem(503, "The request was aborted.")
        return found

    def response(self, outputs: Sequence[RequestOutput], data: list[dict[str, Any]]) -> dict[str, Any]:
        """A response with `data`, one for each result."""
        return {**self.head, "data": data, **self.about(outputs)}

    def about(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Usage, and the version of the weights that made the last result."""
        versions = [output.pooled.policy_version for output in outputs if output.pooled is not None]
        return {"usage": total_usage(outputs), "weight_version": max(versions)}


@contextmanager
def _by_names(names: Sequence[str]) -> Iterator[None]:
    """Re-raise the `RequestError` of a prompt, which names its index, with the prompt's name in the body."""
    try:
        yield
    except RequestError as problem:
        found = _INDEX.match(str(problem))
        if found is None:
            raise
        text = f"{names[int(found[1])]}: {str(problem)[found.end() :]}"
        raise RequestError(text, field=problem.field, value=problem.value, bound=problem.bound) from problem


def array_of(output: RequestOutput) -> np.ndarray:
    """The result of a request that has one."""
    assert output.pooled is not None and output.pooled.data is not None, "checked"
    return output.pooled.data


def encoded(output: RequestOutput, encoding: Encoding) -> Any:
    """A result as nested lists, or as base64 of its float32 values, little-endian, row by row."""
    data = array_of(output)
    return data.tolist() if encoding == "float" else base64.b64encode(data.astype("<f4").tobytes()).decode()
