"""POST /generate: SGLang's own route for prompts of text or token ids, alone or in batches."""

from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.call import Call
from rollout_engine.serve.generation import Generation
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.sglang.sampling import Wanted, check_num_values, is_scoring, read_sampling
from rollout_engine.serve.sglang.shapes import answer, without_tokens

PEERS: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "video_data": ([],),
    "audio_data": ([],),
    "custom_logit_processor": ("",),
    "return_sampling_mask": (False,),
    "return_indexer_topk": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "session_params": ({},),
    "background": (False,),
    "require_reasoning": (False,),
}
"""Fields of SGLang's that are not served -> the values that ask for nothing."""
IGNORED = frozenset(("log_metrics", "no_logs", "custom_labels", "modalities", "conversation_id", "bootstrap_room"))
"""Fields that change no token."""


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request. Those that may be lists have one value for each prompt then."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    """Token ids of a prompt, or of each; in place of `text`."""
    image_data: Any = None
    """Pictures of a prompt: one, or a list; in a batch a list for each prompt, or one picture for all. Each is a URL,
    base64, or {"url": ...}; the prompt has a placeholder for each."""
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | list[bool] | None = None
    """For a mixture of experts: `meta_info.routed_experts`."""
    return_entropy: bool | list[bool] | None = None
    """`meta_info.output_token_entropy`: the entropy at each sampled token, in nats."""
    return_hidden_states: bool | list[bool] | None = None
    """`meta_info.hidden_states`: the states of the prompt's tokens, then that of each sampled token but the last."""
    return_prompt_token_ids: bool = False
    max_thinking_tokens: int | list[int | None] | None = None
    """The same as `thinking_budget` in `sampling_params`."""
    stream: bool = False
    rid: str | list[str] | None = None
    """The client's name for the request, or each prompt's; /abort_request takes it."""
    session_id: str | None = None
    routing_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None
    """Name of the adapter of all prompts, or of each; None and "" for the base model."""
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None


async def generate(served: Served, asked: Asked) -> Reply | Events:
    """Complete prompts of text or token ids; while generation is paused, they wait."""
    call = await asked.read_fields(_GenerateCall, served, asked)
    await call.check_adapters()
    return await call.answer()


class _GenerateCall(Call):
    repeats = True

    def __init__(self, served: Served, asked: Asked) -> None:
        super().__init__(served, asked)
        body: GenerateBody = asked.body
        self._body = body
        given = _given_prompts(body)
        self._is_batch = _is_batch(body)
        self._num_prompts = len(given)
        self._wanted = [self._wanted_of(index) for index in range(self._num_prompts)]
        kind = "cumulative" if body.stream else "final_only"
        sampling = [self._sampling_of(index) for index in range(self._num_prompts)]
        self.settings = [
            read_sampling(served.settings, each, wanted, kind)
            for each, wanted in zip(sampling, self._wanted, strict=True)
        ]
        self._is_scoring = [is_scoring(each) for each in sampling]
        self._num_samples = [settings.params.n for settings in self.settings]
        self._loras = [self._one("lora_path", index) or None for index in range(self._num_prompts)]
        self.prompts = [self._with_options(prompt, index) for index, prompt in enumerate(given)]
        self._names = self._request_names()
        self._prompt_scores: dict[int, np.ndarray] = {}
        """Index of a prompt -> float32 [tokens, ids], log-probs of the ids that it wants at its own places."""

    async def check_adapters(self) -> None:
        """Raise `HttpProblem` 404 for an adapter that is not there."""
        for name in {lora for lora in self._loras if lora is not None}:
            await self.served.adapter_of(name, "lora_path")

    def generation(self) -> Generation:
        return Generation(self.served, self.asked, self._names)

    async def start(self, generation: Generation) -> None:
        body = self._body
        rank = body.routed_dp_rank if body.data_parallel_rank is None else body.data_parallel_rank
        key = body.session_id or body.routing_key or (None if rank is None else f"data-parallel-rank-{rank}")
        options: dict[str, Any] = {"priority": body.priority or 0, "session_id": key}
        await generation.start(self.prompts, self.settings, repeats=True, **options)

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        wanted, first = self._wanted[index], max(self._wanted[index].logprob_start, 1)
        if index in self._prompt_scores or not (wanted.prompt and wanted.token_ids):
            return
        params = self.settings[index].params  # type: ignore[union-attr]  # they are of this front
        lora = self.prompts[index].get("lora_request")
        completion = output.prompt_token_ids[first:]
        check_num_values(len(completion), len(wanted.token_ids))
        scores = await self.served.engine.score_candidates(
            [output.prompt_token_ids[:first]],
            [completion],
            np.tile(np.array(wanted.token_ids, np.int64), (len(completion), 1)),
            temperature=1.0 if params.logprobs_mode == "raw" else params.temperature,
            lora=lora,
            pictures=[output.pictures] if output.pictures else None,  # type: ignore[arg-type]  # the verb's `prepare` reads it
        )
        assert scores.candidates is not None, "they were asked for"
        self._prompt_scores[index] = scores.candidates

    async def write(self, results: list[RequestOutput]) -> Any:
        for index, output in enumerate(results):
            await self.prepare_output(index, output)
        answers = [
            self.write_event(index, output, [sample], {})
            for index, output in enumerate(results)
            for sample in output.outputs
        ]
        return answers if self._gives_list else answers[0]

    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> dict[str, Any]:
        [sample] = samples
        several = self._num_samples[index] > 1
        name = f"{self._names[index]}-{sample.index}" if several else self._names[index]
        wanted, texts = self._wanted[index], self._body.return_text_in_logprobs
        counted = without_tokens(sample) if self._is_scoring[index] else sample
        scores = self._prompt_scores.get(index)
        made = answer(self.served, name, output, counted, wanted, texts=texts, prompt_scores=scores)
        if self._body.return_prompt_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        if self._body.stream and self._gives_list:
            made["index"] = sum(self._num_samples[:index]) + sample.index
        return made

    @property
    def _gives_list(self) -> bool:
        return self._is_batch or self._num_samples != [1]

    def _one(self, field: str, index: int) -> Any:
        """The value of a field for one prompt. Raises `RequestError` for a list of another length."""
        value = getattr(self._body, field)
        if not isinstance(value, list):
            return value
        if not self._is_batch and len(value) == 1:
            return value[0]
        if len(value) != self._num_prompts:
            bound = f"one value for all prompts, or a list of {self._num_prompts}"
            raise RequestError.for_field(field, value[:8], bound)
        return value[index]

    def _pictures(self, index: int) -> list[Any]:
        """The pictures of one prompt, which `MediaReader` has put in place of their names. Raises `RequestError`."""
        value = self._body.image_data
        if not isinstance(value, list):
            return [] if value is None else [value]
        if not self._is_batch and not any(isinstance(each, list) for each in value):
            return [each for each in value if each is not None]
        own = self._one("image_data", index)
        return [each for each in (own if isinstance(own, list) else [own]) if each is not None]

    def _sampling_of(self, index: int) -> dict[str, Any]:
        given, budget = self._one("sampling_params", index) or {}, self._one("max_thinking_tokens", index)
        if budget is None:
            return given
        if given.get("thinking_budget", budget) != budget:
            bound = f"thinking_budget of sampling_params, which is {given['thinking_budget']}"
            raise RequestError.for_field("max_thinking_tokens", budget, bound, "Give one of them.")
        return {**given, "thinking_budget": budget}

    def _wanted_of(self, index: int) -> Wanted:
        start = self._one("logprob_start_len", index)
        ids = self._body.token_ids_logprob
        if ids is not None and ids and isinstance(ids[0], list):
            ids = self._one("token_ids_logprob", index)
        return Wanted(
            logprobs=bool(self._one("return_logprob", index)),
            logprob_start=-1 if start is None else start,
            num_top=self._one("top_logprobs_num", index) or 0,
            token_ids=tuple(ids or ()),  # type: ignore[arg-type]
            routed=bool(self._one("return_routed_experts", index)),
            entropy=bool(self._one("return_entropy", index)),
            states=bool(self._one("return_hidden_states", index)),
        )

    def _with_options(self, prompt: dict[str, Any], index: int) -> dict[str, Any]:
        salts = [salt for field in ("cache_salt", "extra_key") if (salt := self._one(field, index))]
        prompt = {**prompt, "cache_salt": "/".join(salts)} if salts else prompt
        lora, pictures = self._loras[index], self._pictures(index)
        prompt = {**prompt, "multi_modal_data": {"image": pictures}} if pictures else prompt
        return {**prompt, "lora_request": lora} if lora not in (None, self.served.model, "default") else prompt

    def _request_names(self) -> list[str]:
        rid = self._body.rid
        if isinstance(rid, list):
            return [self._one("rid", index) for index in range(self._num_prompts)]
        name = rid or self.asked.request_id
        return [f"{name}_{index}" for index in range(self._num_prompts)] if self._is_batch else [name]


def _is_batch(body: GenerateBody) -> bool:
    if body.text is not None:
        return isinstance(body.text, list)
    return bool(body.input_ids) and isinstance(body.input_ids[0], list)  # type: ignore[index]


def _given_prompts(body: GenerateBody) -> list[dict[str, Any]]:
    """The prompts of a body, in our own form. Raises `RequestError`."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError.for_field("text", body.text, "given, or input_ids in its place: one of them")
    name, key = ("text", "prompt") if body.text is not None else ("input_ids", "prompt_token_ids")
    value: Any = getattr(body, name)
    if not value:
        raise RequestError.for_field(name, value, "not empty")
    return [{key: each} for each in (value if _is_batch(body) else [value])]
