"""A model provider for Inspect: "rollout_engine/MODEL", by the entry point group "inspect_ai".

    inspect eval task.py --model rollout_engine/Qwen/Qwen3-0.6B -M dtype=bfloat16
    get_model("rollout_engine/live", policy=policy)

Model arguments are fields of `EngineConfig`; or `policy=`, an engine that exists. As many samples are in flight at once
as Inspect's `max_connections` says. Tools are not offered to the model: a task that has some is refused; the HTTP
server with Inspect's own OpenAI provider serves those.
"""

from typing import Any

import numpy as np
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
    modelapi,
)

from rollout_engine.errors import EngineGenerateError, RequestError
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.outputs import CompletionOutput, RequestOutput
from rollout_engine.policy import RolloutPolicy
from rollout_engine.sampling_params import SamplingParams

_SAME = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens", "logit_bias", "seed")
_ENDS: dict[str, Any] = {"stop": "stop", "length": "max_tokens"}


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
        """`policy`: an engine that exists, and goes on when Inspect is done; None: make one in a process of its own."""
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
        """Answer a conversation. Raises `RequestError` for tools, `EngineGenerateError` for a request that failed."""
        if tools:
            hint = "Use the HTTP server with the provider 'openai-api' for tasks with tools."
            raise RequestError.for_field("tools", [tool.name for tool in tools], "none", hint)
        messages = [{"role": message.role, "content": message.text} for message in input]
        async for output in self._engine.generate({"messages": messages}, _params(config)):
            if output.finished:
                return self._output(output, config)
        raise EngineGenerateError(f"{self.model_name}: the request ended without an output.")

    def _output(self, output: RequestOutput, config: GenerateConfig) -> ModelOutput:
        for sample in output.outputs:
            if sample.finish_reason not in _ENDS:
                what = sample.error or f"it ended by {sample.finish_reason!r}"
                raise EngineGenerateError(f"{self.model_name}, sample {sample.index}: {what}.")
        num_prompt = len(output.prompt_token_ids)
        num_sampled = sum(len(sample.token_ids) for sample in output.outputs)
        usage = ModelUsage(input_tokens=num_prompt, output_tokens=num_sampled, total_tokens=num_prompt + num_sampled)
        return ModelOutput(
            model=self.model_name, choices=[self._choice(sample, config) for sample in output.outputs], usage=usage
        )

    def _choice(self, sample: CompletionOutput, config: GenerateConfig) -> ChatCompletionChoice:
        message = ChatMessageAssistant(content=sample.text, model=self.model_name, source="generate")
        logprobs = None
        if config.logprobs:
            values = np.zeros(0) if sample.logprobs is None else sample.logprobs
            tokenizer = self._engine.frontend.get_tokenizer()
            texts = [tokenizer.decode([token_id]) for token_id in sample.token_ids]
            content = [Logprob(token=text, logprob=float(v)) for text, v in zip(texts, values, strict=True)]
            logprobs = Logprobs(content=content)
        assert sample.finish_reason is not None
        return ChatCompletionChoice(message=message, stop_reason=_ENDS[sample.finish_reason], logprobs=logprobs)


def _params(config: GenerateConfig) -> SamplingParams:
    given = {name: getattr(config, name) for name in _SAME if getattr(config, name) is not None}
    return SamplingParams(
        **given,
        n=config.num_choices or 1,
        stop=config.stop_seqs or None,
        logprobs=0 if config.logprobs else None,
        output_kind="final_only",
    )
