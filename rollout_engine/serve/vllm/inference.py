"""POST /inference/v1/generate: token ids in, token ids out. Nothing is tokenized, and no text is made."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.support import support_of
from rollout_engine.serve.bodies import read_fields
from rollout_engine.serve.call import Call, CallFields, media_of, salt_of
from rollout_engine.serve.openai.logprobs import token_logprobs
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import (
    StreamOptions,
    of_versions,
    routed_fields,
    sampled_fields,
    total_usage,
    weight_versions,
)
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import SAMPLING_PEERS, SamplingFields, Settings
from rollout_engine.serve.served import Served
from rollout_engine.serve.vllm.prompt_scores import PromptScores

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


class InferenceBody(CallFields, kw_only=True):
    """Fields of a request."""

    token_ids: list[int]
    """The prompt."""
    multi_modal_data: dict[str, Any] | None = None
    """Pictures, {"image": [URL, ...]}, one for each placeholder in the prompt; as vLLM's prompts have them."""
    sampling_params: dict[str, Any] = {}
    """Settings by their names in vLLM's `SamplingParams`. Without `max_tokens`, up to the longest sequence."""
    lora_request: str | NamedLora | None = None
    """An adapter, by its name, in place of `model`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Give the prompt's ids back."""
    return_routed_experts: bool | None = None
    """For a mixture of experts: `routed_experts` of each choice."""
    return_sampling_mask: bool | None = None
    """`sampling_mask` of each choice: for each token the ids that its draw had left, [] for the whole vocabulary."""


async def generate(served: Served, asked: Asked) -> Reply | Events:
    """Complete a prompt of token ids by token ids."""
    lora = await _adapter(served, asked.body)
    return await (await asked.read_fields(_InferenceCall, served, asked, lora)).answer()


class _InferenceCall(Call):
    settings: Settings
    joins_samples = True

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        super().__init__(served, asked, lora)
        self._body: InferenceBody = asked.body
        self._scores = _prompt_scores(served, self._body)
        self.settings = _settings(served, self._body)
        self.prompts = [_prompt(self._body)]
        self._first_fields: dict[str, Any] = {}
        """Further fields of the first event."""
        self._num_routed: dict[int, int] = {}
        """Tokens of each sample whose experts have been streamed."""

    async def write(self, results: list[RequestOutput]) -> dict[str, Any]:
        [result] = results
        choices = [self._choice(result, sample) for sample in result.outputs]
        about_prompt = await self._about_prompt(result)
        more = {
            "usage": total_usage(results),
            "prompt_logprobs": about_prompt.pop("prompt_logprobs", None),
            "kv_transfer_params": None,
            "weight_version": max(choice["weight_version"] for choice in choices),
        }
        if self._scores is not None:
            params, token_ids = self.settings.params, self._body.token_ids
            more["prompt_token_id_logprobs"] = await self._scores.compute(self.served, token_ids, params, self.lora)
        return self._response(choices, about_prompt | more)

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        self._first_fields = {} if self.outputs else await self._about_prompt(output)

    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return self._response([self._choice(output, sample) for sample in samples], self._first_fields | usage)

    def write_last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._response([], usage)

    async def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}
        if self.settings.params.prompt_logprobs is not None:
            found["prompt_logprobs"] = await prompt_rows(self.served, output)
        return found

    def _response(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        name, model = self._body.request_id or self.asked.request_id, self.lora or self.served.model
        return {"request_id": name, "model": model, "created": self.created, "choices": choices, **more}

    def _choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": sample.index,
            "token_ids": sample.token_ids,
            "logprobs": token_logprobs(sample, self.settings.params.logprob_token_ids or ()),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "seed": sample.seed,
            **self._routed_experts(sample),
            **self._sampling_mask(sample),
            **sampled_fields(sample, output),
            "weight_versions": weight_versions(self.served, sample),
            **of_versions(sample, self.served.weight_version),
        }

    def _sampling_mask(self, sample: CompletionOutput) -> dict[str, Any]:
        """The supports of a choice's tokens, so far or of those that a streamed event adds."""
        return {"sampling_mask": support_of(sample).lists()} if self._body.return_sampling_mask else {}

    def _routed_experts(self, sample: CompletionOutput) -> dict[str, Any]:
        """Routed experts of all but the last of prompt and completion: so far, or those that a streamed event adds."""
        if not self._body.return_routed_experts:
            return {}
        start = 0
        if self._body.stream and sample.routed_experts is not None:
            start = self._num_routed.get(sample.index, 0)
            self._num_routed[sample.index] = start + len(sample.routed_experts)
        return {"routed_experts": routed_fields(sample.routed_experts, start)}


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


def _prompt_scores(served: Served, body: InferenceBody) -> PromptScores | None:
    """The tokens whose log-probs at the prompt's places are wanted; takes them out of the sampling parameters."""
    scores = PromptScores.read(body.sampling_params, len(body.token_ids), served.engine.frontend.client.info.vocab_size)
    for field, value in (
        ("stream", body.stream),
        ("multi_modal_data", body.multi_modal_data),
        ("truncate_prompt_tokens", body.sampling_params.get("truncate_prompt_tokens")),
    ):
        if scores is not None and value:
            raise RequestError.for_field(field, value, "absent with prompt_logprob_token_ids")
    return scores


def _settings(served: Served, body: InferenceBody) -> Settings:
    given = dict(body.sampling_params)
    logprobs = given.pop("logprobs", None)
    fields: SamplingFields = read_fields(
        SamplingFields, given, "sampling_params", ignored=_SAMPLING_IGNORED, neutral=_SAMPLING_PEERS
    )
    if isinstance(fields.extra_args, dict):
        fields.extra_args = {k: v for k, v in fields.extra_args.items() if k != _COMPACT} or None
    more = {} if fields.stop or fields.stop_regex else {"detokenize": False}
    more |= {"return_routed_experts": bool(body.return_routed_experts)}
    more |= {"return_support": bool(body.return_sampling_mask)}
    kind = "delta" if body.stream else "final_only"
    return served.settings.read(fields, output_kind=kind, logprobs=logprobs, **more)


def _prompt(body: InferenceBody) -> dict[str, Any]:
    if not body.token_ids:
        raise RequestError.for_field("token_ids", body.token_ids, "at least one id")
    return {"prompt_token_ids": body.token_ids, **salt_of(body), **media_of(body)}
