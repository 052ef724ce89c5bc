"""Offline generation: a list of prompts in, a list of results out."""

import os
from collections.abc import Sequence
from typing import Any, Self, Unpack

from rollout_engine.base.beam_search import BeamSearchOutput, BeamSearchParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.metrics import StatLogger
from rollout_engine.base.outputs import PoolingRequestOutput, RequestOutput
from rollout_engine.base.pooling_params import PoolingLike, as_pooling_params, pooling_only, refuse_pooling
from rollout_engine.base.sampling_params import SamplingLike
from rollout_engine.base.version_pin import with_versions
from rollout_engine.faces.beam_search import BeamSearches
from rollout_engine.faces.generate_run import generate_all
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.verb_methods import BlockingVerbs
from rollout_engine.telemetry.progress import ProgressBar
from rollout_engine.telemetry.spans import TraceHeaders
from rollout_engine.text.conversations import ChatOptions, is_conversation
from rollout_engine.text.prompts import Prompt, check_chat_arguments

Conversation = list[dict[str, Any]]


class LLM(BlockingVerbs):
    """A model, ready to generate. Keyword arguments are `EngineConfig`'s.

    >>> with LLM("path/or/hub-id", max_num_seqs=64) as llm:
    ...     outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=16))
    """

    def __init__(
        self, model: str | os.PathLike[str], *, stat_loggers: Sequence[StatLogger] = (), **engine_kwargs: Any
    ) -> None:
        config = EngineConfig.from_kwargs(model=model, **engine_kwargs)
        self._set_engine(LLMEngine.from_config(config, stat_loggers=stat_loggers))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Wrap an existing engine."""
        llm = cls.__new__(cls)
        llm._set_engine(engine)
        return llm

    def _set_engine(self, engine: LLMEngine) -> None:
        self.llm_engine, self.frontend = engine, engine.frontend

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """One finished `RequestOutput` per prompt, in order. Several threads may call it at once.

        `sampling_params`: one for all prompts, or a list with one each; a dict of their fields will do; None: the
        defaults. All prompts are checked before any is queued (`RequestError` names the index). Whatever interrupts it
        ends its requests. Requests added through `llm_engine` continue meanwhile; their results wait for its next
        `step()`.

        `priority`: one for all prompts, or a list with one each; lower runs first. `session_id`, the same way, as
        in `LLMEngine.add_request`: it has an effect over replicas only. `lora_request`: the adapter, one for all or one
        each, None for the base model: the name of one that the engine has, or a `LoRARequest` with its path or tensors,
        which is added first (`add_lora`) unless it is there in this revision. `trace_headers` (W3C `traceparent`) make
        the spans of all these requests, if there are any, part of the caller's trace. `policy_version`,
        `min_policy_version`: those of `SamplingParams`, for all prompts; one that is not live yet is waited for, and
        another thread has to update the weights. `chat`: the options of `ChatOptions` (`tools`, `chat_template`,
        `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`), for prompts that are conversations.

        Raises `LifecycleError` while paused or asleep, since it would block forever; paused by another thread once it
        has begun, it waits for that thread to resume. `DirtyWeightsError` while the weights are incomplete.
        """
        refuse_pooling(sampling_params)
        params = with_versions(sampling_params, policy_version, min_policy_version)
        options: Any = dict(lora_request=lora_request, use_tqdm=use_tqdm, priority=priority, session_id=session_id)
        options["trace_headers"] = trace_headers
        return generate_all(self.frontend, self.generate, prompts, params, chat, **options)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        use_tqdm: bool = True,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, through the tokenizer's chat template."""
        check_chat_arguments(chat, self.chat)
        if not isinstance(messages, list | tuple):
            raise RequestError.for_field("messages", messages, "a conversation (a list of dict), or a list of them")
        conversations = [messages] if is_conversation(messages) else messages
        prompts = [{"messages": conversation} for conversation in conversations]
        options: Any = dict(session_id=session_id, lora_request=lora_request, trace_headers=trace_headers)
        options |= dict(policy_version=policy_version, min_policy_version=min_policy_version)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **options, **chat)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | dict[str, Any],
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return for each prompt the `beam_width` sequences of the highest scores, best first.

        Scores are of the engine's own log-probs, which are the trainer's bit for bit. All beams of all prompts, or of
        `concurrency_limit` prompts, are requests of one batch in each step, and the prefix cache has their common
        tokens. Raises `RequestError` before anything is computed, and otherwise as `generate`, but
        `EngineGenerateError` for a beam that fails and `RetryableError` for one that is aborted.
        """
        search = BeamSearches.begin(self.frontend, prompts, params, lora_request, concurrency_limit)
        with ProgressBar(len(search), desc="beam_search", unit="prompt", shown=use_tqdm) as bar:
            while asked := search.prompts:
                for num_tokens in search.extend(self.generate(asked, search.sampling_params, use_tqdm=False)):
                    bar.update(num_tokens)
        return search.outputs(self.frontend)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingLike | Sequence[PoolingLike] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool each prompt to hidden states, or to the output of the checkpoint's head: one output each, in order.

        `pooling_params`: one for all prompts, or a list with one each; a dict of their fields will do; None: the hidden
        state of the last token. The requests are computed in the same steps as any others. A conversation is pooled as
        it is, without the header of a next message. Arguments, errors and interrupts otherwise as in `generate`.
        """
        params = pooling_only(pooling_params)
        options: Any = dict(lora_request=lora_request, use_tqdm=use_tqdm, priority=priority, session_id=session_id)
        options["trace_headers"] = trace_headers
        found = generate_all(self.frontend, self.encode, prompts, params, chat, **options)
        return [PoolingRequestOutput.of(output) for output in found]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        step_token_ids: Sequence[int] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[PoolingRequestOutput]:
        """`encode` with kind="reward": `outputs.data` is [1], or [S] with `step_token_ids`, one for each in the prompt.

        Raises `RequestError` if the checkpoint has no head with one label.
        """
        check_chat_arguments(chat, self.reward)
        params = as_pooling_params({"kind": "reward", "step_token_ids": step_token_ids})
        options: Any = dict(lora_request=lora_request, trace_headers=trace_headers)
        return self.encode(prompts, params, use_tqdm=use_tqdm, **options, **chat)

    def get_num_unfinished_requests(self, *, timeout: float | None = None) -> int:
        """Requests whose finished output has not been returned. It never waits for `timeout`."""
        return self.frontend.num_open()
