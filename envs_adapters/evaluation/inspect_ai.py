"""A model provider for Inspect: "rollout_engine/MODEL", by the entry point group "inspect_ai".

    inspect eval task.py --model rollout_engine/Qwen/Qwen3-0.6B -M dtype=bfloat16
    get_model("rollout_engine/live", policy=policy)

Model arguments are fields of `EngineConfig`; or `policy=`, an engine that exists. As many samples are in flight at once
as Inspect's `max_connections`. Images are served by models that take pictures: data URLs and paths of files. Tools and
settings that the engine would ignore are refused: the HTTP server with Inspect's own OpenAI provider serves tools. A
conversation that does not fit into the model's context ends with the stop reason "model_length", as with Inspect's own
providers.
"""

from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    TopLogprob,
    modelapi,
)

from rollout_engine.base.errors import EngineGenerateError, RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.rollouts.policy import RolloutPolicy

_SAME = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens", "logit_bias", "seed")
_READ = (*_SAME, "num_choices", "stop_seqs", "logprobs", "top_logprobs", "response_schema")
_OF_INSPECT = (
    *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections"),
    *("system_message", "cache", "cache_prompt", "batch", "reasoning_history", "fail_on_refusal", "max_tool_output"),
    *("parallel_tool_calls", "internal_tools"),
)
"""Settings that Inspect carries out itself, or that change no answer without tools."""


@modelapi(name="rollout_engine")
class RolloutEngineAPI(ModelAPI):  # type: ignore[misc]
    """An engine as Inspect's model."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # as in ModelAPI
        policy: RolloutPolicy | None = None,
        **engine_kwargs: Any,
    ) -> None:
        """`policy`: an engine that exists, and outlives Inspect; None: make one in a process of its own."""
        super().__init__(model_name, base_url, api_key, [], config)
        self._owns = policy is None
        self._engine = AsyncLLM(model_name, **engine_kwargs) if policy is None else AsyncLLM.from_engine(policy)

    def close(self) -> None:
        """End the engine, if it was made here."""
        if self._owns:
            self._engine.shutdown()

    async def generate(
        self, input: list[ChatMessage], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a conversation.

        Raises `RequestError` for tools, parts other than text and images, images that are refused and settings that the
        engine does not have, and `EngineGenerateError` for a request that failed.
        """
        if tools:
            raise _refusal_of_tools([tool.name for tool in tools])
        messages, params = [_message(message) for message in input], _params(config)
        try:
            return await self._answer(messages, params, config)
        except RequestError as problem:
            if problem.field == "max_tokens" and config.max_tokens is not None:  # more than the room behind the prompt
                return await self._answer(messages, params.clone(max_tokens=None), config)
            if problem.field == "prompt" and "max_model_len" in problem.bound:
                return ModelOutput.from_content(self.model_name, str(problem), stop_reason="model_length")
            raise

    async def _answer(
        self, messages: list[dict[str, Any]], params: SamplingParams, config: GenerateConfig
    ) -> ModelOutput:
        async for output in self._engine.generate({"messages": messages}, params):
            if output.finished:
                return self._output(output, config)
        raise EngineGenerateError(f"{self.model_name}: the request ended without an output.")

    def _output(self, output: RequestOutput, config: GenerateConfig) -> ModelOutput:
        for sample in output.outputs:
            if sample.finish_reason not in ("stop", "length"):
                what = sample.error or f"it ended by {sample.finish_reason!r}"
                raise EngineGenerateError(f"{self.model_name}, sample {sample.index}: {what}.")
        num_prompt = len(output.prompt_token_ids)
        num_sampled = sum(len(sample.token_ids) for sample in output.outputs)
        usage = ModelUsage(input_tokens=num_prompt, output_tokens=num_sampled, total_tokens=num_prompt + num_sampled)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(sample, config, num_prompt) for sample in output.outputs],
            usage=usage,
        )

    def _choice(self, sample: CompletionOutput, config: GenerateConfig, num_prompt: int) -> ChatCompletionChoice:
        message = ChatMessageAssistant(content=sample.text, model=self.model_name, source="generate")
        wants_logprobs = config.logprobs or config.top_logprobs is not None
        logprobs = self._logprobs(sample) if wants_logprobs else None
        stop_reason: StopReason = "stop"
        if sample.finish_reason == "length":
            is_full = num_prompt + len(sample.token_ids) >= self._engine.frontend.client.info.max_model_len
            stop_reason = "model_length" if is_full and len(sample.token_ids) != config.max_tokens else "max_tokens"
        return ChatCompletionChoice(message=message, stop_reason=stop_reason, logprobs=logprobs)

    def _logprobs(self, sample: CompletionOutput) -> Logprobs:
        tokenizer = self._engine.frontend.get_tokenizer()
        values = [] if sample.logprobs is None else sample.logprobs.tolist()
        tops: list[list[TopLogprob]] | None = None
        if sample.top_logprobs is not None:
            rows = zip(*(each.tolist() for each in sample.top_logprobs), strict=True)
            tops = [
                [TopLogprob(token=tokenizer.decode([i]), logprob=v) for i, v in zip(*row, strict=True)] for row in rows
            ]
        content = [
            Logprob(token=tokenizer.decode([token_id]), logprob=value, top_logprobs=tops[place] if tops else None)
            for place, (token_id, value) in enumerate(zip(sample.token_ids, values, strict=True))
        ]
        return Logprobs(content=content)


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates take it. Raises `RequestError` for content that is neither text nor an image."""
    calls = getattr(message, "tool_calls", None)
    if calls or message.role == "tool":
        raise _refusal_of_tools([call.function for call in calls or []] or [message.role])
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    return {"role": message.role, "content": [_part(part, message.role) for part in message.content]}


def _part(part: Any, role: str) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type != "image":
        hint = "Other parts are served by no model of this provider."
        raise RequestError.for_field(f"content of the {role} message", part.type, "text and images", hint)
    if part.detail != "auto":
        hint = "The checkpoint's files set how images are processed."
        raise RequestError.for_field("detail of an image", part.detail, "'auto'", hint)
    return {"type": "image", "image": part.image}


def _refusal_of_tools(names: list[str]) -> RequestError:
    hint = "Use the HTTP server with the provider 'openai-api' for tasks with tools."
    return RequestError.for_field("tools", names, "none", hint)


def _params(config: GenerateConfig) -> SamplingParams:
    """The sampling settings. Raises `RequestError` for those that the engine does not have."""
    settings = {name: getattr(config, name) for name in type(config).model_fields}
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        if name not in (*_READ, *_OF_INSPECT):
            raise RequestError.for_field(name, value, "left out, since this provider would ignore it")
    schema = config.response_schema
    asked = config.logprobs or config.top_logprobs is not None
    return SamplingParams(
        **{name: given[name] for name in _SAME if name in given},
        n=config.num_choices or 1,
        stop=config.stop_seqs or None,
        logprobs=(config.top_logprobs or 0) if asked else None,
        structured_outputs=None if schema is None else {"json": schema.json_schema.model_dump(exclude_none=True)},
        output_kind="final_only",
    )
