"""Offline generation: a list of prompts in, a list of results out."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Unpack

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout_engine.config import EngineConfig
from rollout_engine.errors import EngineGenerateError, LifecycleError, RequestError
from rollout_engine.frontend.conversations import ChatOptions, is_conversation
from rollout_engine.frontend.interrupts import deliver, held
from rollout_engine.frontend.lifecycle_control import PAUSED_POLL_SECONDS, LifecycleControl
from rollout_engine.frontend.lifecycle_verbs import LifecycleVerbs
from rollout_engine.frontend.llm_engine import LLMEngine
from rollout_engine.frontend.progress import ProgressBar
from rollout_engine.frontend.prompts import Prompt, check_chat_arguments, with_chat_options
from rollout_engine.frontend.weight_verbs import WeightVerbs
from rollout_engine.frontend.worker_calls import WorkerCalls, WorkerVerbs
from rollout_engine.messages import UpdateOptions
from rollout_engine.metrics import EngineMetrics, StatLogger
from rollout_engine.outputs import RequestOutput, UpdateReport
from rollout_engine.sampling_params import SamplingLike, SamplingParams
from sync.base import WeightSource

Conversation = list[dict[str, Any]]


class LLM(LifecycleVerbs, WeightVerbs, WorkerVerbs):
    """A model, ready to generate. Keyword arguments are `EngineConfig`'s.

    >>> with LLM("path/or/hub-id", max_num_seqs=64) as llm:
    ...     outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=16))
    """

    def __init__(
        self, model: str | os.PathLike[str], *, stat_loggers: Sequence[StatLogger] = (), **engine_kwargs: Any
    ) -> None:
        config = EngineConfig.from_kwargs(model=model, **engine_kwargs)
        self.llm_engine = LLMEngine.from_config(config, stat_loggers=stat_loggers)
        self._generating = threading.Lock()

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> "LLM":
        """Around an engine that exists."""
        llm = cls.__new__(cls)
        llm.llm_engine, llm._generating = engine, threading.Lock()
        return llm

    @property
    def lifecycle_control(self) -> LifecycleControl:
        return self.llm_engine.lifecycle_control

    @property
    def worker_calls(self) -> WorkerCalls:
        return self.llm_engine.worker_calls

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self.llm_engine.policy_version

    def get_metrics(self) -> EngineMetrics:
        """Counters, gauges and timings of now; from any thread."""
        return self.llm_engine.get_metrics()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """One finished `RequestOutput` per prompt, in order. Calls from several threads take turns.

        `sampling_params`: one for all prompts, or a list with one each; a dict of their fields will do; None: the
        defaults. All prompts are checked before any is queued (`RequestError` names the index). Whatever interrupts it
        ends its requests. Requests added through `llm_engine` go on meanwhile; their results wait for its next
        `step()`.

        `priority`: one for all prompts, or a list with one each; lower runs first. `chat`: the options of `ChatOptions`
        (`tools`, `chat_template`, `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`), for
        prompts that are conversations.

        Raises `LifecycleError` while paused or asleep, since it would wait for ever; paused by another thread once it
        has begun, it waits for that thread to resume. `DirtyWeightsError` while the weights are incomplete.
        """
        check_chat_arguments(chat, self.generate)
        prompts = with_chat_options(prompts, chat)
        self.llm_engine.require_running("generate")
        with self._generating, held():
            request_ids = self.llm_engine.add_requests(prompts, _final_only(sampling_params), priority=priority)
            try:
                return self._run(request_ids, use_tqdm)
            except BaseException:
                with suppress(LifecycleError):  # of an engine that is gone meanwhile
                    self.llm_engine.abort_request(request_ids, discard=True)
                raise

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        use_tqdm: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """`generate` for one conversation or a list of them, through the tokenizer's chat template."""
        check_chat_arguments(chat, self.chat)
        if not isinstance(messages, list | tuple):
            raise RequestError.for_field("messages", messages, "a conversation (a list of dict), or a list of them")
        conversations = [messages] if is_conversation(messages) else messages
        prompts = [{"messages": conversation} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **chat)

    def score(
        self,
        prompt_token_ids: Sequence[list[int]],
        completion_token_ids: Sequence[list[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-probs of given completions under the live weights: per sequence float32 [len(completion)]."""
        return self.llm_engine.score(prompt_token_ids, completion_token_ids, temperature=temperature)

    def apply_update(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """See `update_weights`."""
        return self.llm_engine.apply_update(source, version, options)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the checkpoint's generation_config.json recommends; nothing applies them by itself."""
        return self.llm_engine.get_default_sampling_params()

    def get_model_metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight."""
        return self.llm_engine.get_model_metadata()

    def get_cache_usage(self) -> float:
        """KV blocks referenced by live requests / all blocks."""
        return self.llm_engine.get_cache_usage()

    def get_num_unfinished_requests(self) -> int:
        """Requests whose finished output has not been returned."""
        return self.llm_engine.get_num_unfinished_requests()

    def shutdown(self) -> None:
        """Free model and KV pool. Calling it again is a no-op."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        waiting = set(request_ids)
        with ProgressBar(len(request_ids), desc="generate", unit="prompt", shown=use_tqdm) as bar:
            while waiting:
                deliver()
                for output in self._step(waiting):
                    done[output.request_id] = output
                    waiting.remove(output.request_id)
                    bar.update(sum(len(sample.token_ids) for sample in output.outputs))
                bar.count(lambda: self.llm_engine.num_tokens(waiting))
        return [done[request_id] for request_id in request_ids]

    def _step(self, waiting: set[str]) -> list[RequestOutput]:
        """One engine step; results of others are handed back."""
        self.llm_engine.wait_until_steppable(PAUSED_POLL_SECONDS)
        outputs = self.llm_engine.step()
        mine = [output for output in outputs if output.request_id in waiting]
        self.llm_engine.hand_back(output for output in outputs if output.request_id not in waiting)
        if not mine and not any(self.llm_engine.is_unfinished(request_id) for request_id in waiting):
            raise EngineGenerateError(
                f"Results of {len(waiting)} prompts are gone: another caller of llm_engine.step() took them."
            )
        return mine


def _final_only(params: Any) -> Any:
    """The same params without outputs on the way, which nobody would see."""
    if isinstance(params, list | tuple):
        return [_final_only(each) for each in params]
    if params is None or isinstance(params, dict):
        return {**(params or {}), "output_kind": "final_only"}
    if not isinstance(params, SamplingParams):
        return params  # refused, with its index, by the input processor
    return msgspec.structs.replace(params, output_kind="final_only")
