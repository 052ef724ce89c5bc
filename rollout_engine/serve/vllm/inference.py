"""POST /inference/v1/generate: token ids in, token ids out. Nothing is tokenized, and no text is made."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.bodies import read_fields
from rollout_engine.serve.generation import Generation, failed
from rollout_engine.serve.openai.logprobs import token_logprobs
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import StreamOptions, now, of_versions, total_usage, weight_versions
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.routed_experts import as_fields
from rollout_engine.serve.sampling import SAMPLING_PEERS, SamplingFields, Settings
from rollout_engine.serve.served import Served

PEERS: dict[str, tuple[Any, ...]] = {
    "features": ({},),
    "content_parts": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
"""Fields of vLLM's that are not served -> the values that ask for nothing."""
IGNORED = frozenset(("assistant_tokens_mask", "token_offsets"))
"""Fields that clients pass on from vLLM's rendering, and that change no token."""
_SAMPLING_PEERS: dict[str, tuple[Any, ...]] = {
    **SAMPLING_PEERS,
    "skip_reading_prefix_cache": (False,),
    "prompt_logprob_token_ids": (),
}
_SAMPLING_IGNORED = frozenset(("output_kind", "flat_logprobs", "detokenize", "skip_clone"))
_COMPACT = "prl_compact_logprobs"
"""Argument by which prime-rl's clients allow log-probs in a form of their own; they read this one as well."""


class NamedLora(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter as vLLM's `LoRARequest` writes it. /v1/load_lora_adapter loads one; here its name alone counts."""

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | None = None
    base_model_name: str | None = None


class InferenceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    token_ids: list[int]
    """The prompt."""
    sampling_params: dict[str, Any] = {}
    """Settings by their names in vLLM's `SamplingParams`. Without `max_tokens`, up to the longest sequence."""
    model: str | None = None
    """The model, or one of its adapters."""
    lora_request: str | NamedLora | None = None
    """An adapter, by its name, in place of `model`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Give the prompt's ids back."""
    return_routed_experts: bool | None = None
    """For a mixture of experts: `routed_experts` of each choice."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


async def generate(served: Served, asked: Asked) -> Reply | Events:
    """Complete a prompt of token ids by token ids."""
    call = await asked.read_fields(_Call, served, asked, await _adapter(served, asked.body))
    if asked.body.stream:
        return Events(call.events())
    return Reply(await call.reply())


class _Call:
    """One call: its settings, and how its outputs are written."""

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: InferenceBody = asked.body
        self._served, self._asked, self._body, self._lora = served, asked, body, lora
        self._id, self._created = body.request_id or asked.request_id, now()
        self._settings = _settings(served, body)
        self._prompt = _prompt(body)
        self._num_routed: dict[int, int] = {}
        """Tokens of each sample whose experts have been streamed."""

    async def reply(self) -> dict[str, Any]:
        with Generation(self._served, self._asked, self._body.request_id) as generation:
            await self._start(generation)
            [result] = await generation.results()
        choices = self._choices(result)
        more: dict[str, Any] = {"usage": total_usage([result]), "prompt_logprobs": None, "kv_transfer_params": None}
        if self._settings.params.prompt_logprobs is not None:
            more["prompt_logprobs"] = await prompt_rows(self._served, result)
        more["weight_version"] = max(choice["weight_version"] for choice in choices)
        return self._response(choices, self._of_prompt(result) | more)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        asks = self._body.stream_options or StreamOptions()
        num_sampled, last = 0, None
        with Generation(self._served, self._asked, self._body.request_id) as generation:
            await self._start(generation)
            while (found := await generation.next()) is not None:
                _, output = found
                more = await self._first_more(output) if last is None else {}
                num_sampled += sum(len(sample.token_ids) for sample in output.outputs)
                usage = asks.usage_so_far(partial(total_usage, [output], True, num_sampled))
                yield self._response(self._choices(output), more | usage)
                last = output
        if asks.include_usage and last is not None:
            yield self._response([], {"usage": total_usage([last], True, num_sampled)})

    async def _start(self, generation: Generation) -> None:
        body = self._body
        options: dict[str, Any] = {"priority": body.priority, "session_id": body.session_id, "lora": self._lora}
        await generation.start([self._prompt], self._settings, **options)

    async def _first_more(self, output: RequestOutput) -> dict[str, Any]:
        more = self._of_prompt(output)
        if self._settings.params.prompt_logprobs is not None:
            more["prompt_logprobs"] = await prompt_rows(self._served, output)
        return more

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}

    def _response(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        head = {"request_id": self._id, "model": self._lora or self._served.model, "created": self._created}
        return {**head, "choices": choices, **more}

    def _choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        problem = failed(output)
        if problem is not None:
            raise problem
        return [self._choice(sample) for sample in output.outputs]

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": sample.index,
            "token_ids": sample.token_ids,
            "logprobs": token_logprobs(sample, self._settings.params.logprob_token_ids or ()),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "seed": sample.seed,
            **self._routed_experts(sample),
            "weight_versions": weight_versions(self._served, sample),
            **of_versions(sample, self._served.weight_version),
        }

    def _routed_experts(self, sample: CompletionOutput) -> dict[str, Any]:
        """Routed experts of all but the last of prompt and completion: so far, or those that a streamed event adds."""
        if not self._body.return_routed_experts:
            return {}
        start = 0
        if self._body.stream and sample.routed_experts is not None:
            start = self._num_routed.get(sample.index, 0)
            self._num_routed[sample.index] = start + len(sample.routed_experts)
        return {"routed_experts": as_fields(sample.routed_experts, start)}


async def _adapter(served: Served, body: InferenceBody) -> str | None:
    """The adapter that a request names by `lora_request` or `model`. Raises `HttpProblem` 404, and `RequestError`."""
    by_model = await served.adapter_of(body.model)
    given = body.lora_request
    if given is None:
        return by_model
    if isinstance(given, NamedLora):
        served.check_model(given.base_model_name)
        given = given.lora_name
    if by_model not in (None, given):
        raise RequestError.for_field("lora_request", given, f"the adapter '{by_model}', which model names, or left out")
    return await served.adapter_of(given, "lora_request")


def _settings(served: Served, body: InferenceBody) -> Settings:
    given = dict(body.sampling_params)
    logprobs = given.pop("logprobs", None)
    fields: SamplingFields = read_fields(
        SamplingFields, given, "sampling_params", ignored=_SAMPLING_IGNORED, neutral=_SAMPLING_PEERS
    )
    if isinstance(fields.extra_args, dict):
        fields.extra_args = {k: v for k, v in fields.extra_args.items() if k != _COMPACT} or None
    more = {} if fields.stop or fields.stop_regex else {"detokenize": False}
    more["return_routed_experts"] = bool(body.return_routed_experts)
    kind = "delta" if body.stream else "final_only"
    return served.settings.read(fields, output_kind=kind, logprobs=logprobs, **more)


def _prompt(body: InferenceBody) -> dict[str, Any]:
    if not body.token_ids:
        raise RequestError.for_field("token_ids", body.token_ids, "at least one id")
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    return {"prompt_token_ids": body.token_ids, **salt}
