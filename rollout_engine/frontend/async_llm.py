"""The asynchronous engine: the core in a process of its own, requests as async generators."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout_engine._structs import plain
from rollout_engine.config import EngineConfig
from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.errors import DrainTimeoutError, EngineDeadError
from rollout_engine.frontend.conversations import ChatOptions
from rollout_engine.frontend.open_streams import LoopWaker
from rollout_engine.frontend.prompts import Prompt, check_chat_arguments, with_chat_options
from rollout_engine.frontend.remote_engine import RemoteEngine
from rollout_engine.frontend.rpc_wire import ask
from rollout_engine.frontend.spans import TraceHeaders
from rollout_engine.frontend.wire import Health
from rollout_engine.frontend.worker_calls import checked_call, timed_out
from rollout_engine.messages import KvMode, Staging, UpdateMode, UpdateOptions
from rollout_engine.metrics import CoreMetrics, EngineMetrics, StatLogger
from rollout_engine.outputs import RequestOutput, UpdateReport
from rollout_engine.sampling_params import SamplingLike, SamplingParams
from sync.base import WeightSource

HANG_SECONDS = 5.0
START_SECONDS = 600.0


class AsyncLLM:
    """An engine whose core runs in a process of its own. Keyword arguments are `EngineConfig`'s.

    >>> engine = AsyncLLM("path/or/hub-id")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=16)):
    ...     print(output.outputs[0].text)

    It can be made inside or outside an event loop, and used from any loop, several at a time. Every request ends in one
    finished `RequestOutput` or one error; when the core dies, all open requests raise `EngineDeadError` at once.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, stat_loggers: Sequence[StatLogger] = (), **engine_kwargs: Any
    ) -> None:
        config = EngineConfig.from_kwargs(model=model, **engine_kwargs)
        self.remote = RemoteEngine.start(
            config, hang_seconds=HANG_SECONDS, start_seconds=START_SECONDS, stat_loggers=stat_loggers
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        hang_seconds: float = HANG_SECONDS,
        start_seconds: float = START_SECONDS,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> Self:
        """Start a core and wait until its model is loaded. Raises `ConfigError` when it cannot be served.

        `hang_seconds`: a core that gives no sign of life for so long is killed. Long steps do not count: the core's
        heartbeat has a thread of its own. `start_seconds`: how long loading may take. `stat_loggers` as in
        `LLMEngine.from_config`; they run in this process.
        """
        remote = RemoteEngine.start(
            config, hang_seconds=hang_seconds, start_seconds=start_seconds, stat_loggers=stat_loggers
        )
        return cls._over(remote)

    @classmethod
    def connect(cls, address: str, *, hang_seconds: float = HANG_SECONDS) -> Self:
        """One more client on the core of another engine, in this process or another one of the same user and machine.

        `address` is that engine's. Requests and results of clients are apart; `shutdown` leaves the core to its owner,
        and ends what this client has open.
        """
        return cls._over(RemoteEngine.connect(address, hang_seconds=hang_seconds))

    @classmethod
    def _over(cls, remote: RemoteEngine) -> Self:
        engine = cls.__new__(cls)
        engine.remote = remote
        return engine

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingLike | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        trace_headers: TraceHeaders | None = None,
        **chat: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what a request brings, by `output_kind`; the last output has `finished=True`.

        A reader slower than the engine gets at once what has gathered since its last output. Leaving the iteration,
        cancelling it or dropping the generator aborts the request. Lower `priority` runs first. Raises `RequestError`,
        nothing queued, and `EngineDeadError`. `trace_headers` as in `LLMEngine.add_request`, `chat` as in
        `LLM.generate`.
        """
        check_chat_arguments(chat, self.generate)
        waker, event = LoopWaker.of(asyncio.get_running_loop()), asyncio.Event()
        stream = self.remote.add_request(
            with_chat_options(prompt, chat),
            sampling_params,
            request_id,
            lambda _: waker.wake(event),
            priority=priority,
            trace_headers=trace_headers,
        )
        finished = False
        try:
            while not finished:
                event.clear()
                output = self.remote.take(stream)
                if output is None:
                    await event.wait()
                else:
                    finished = output.finished
                    yield output
        finally:
            self.remote.close(stream)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: their generators yield what they had, with finish_reason "abort". Unknown ids are a no-op."""
        self.remote.abort(request_ids)

    async def get_sequence_ids(self, request_id: str) -> list[int]:
        """Sequence ids of a request's samples, as the core's log and `get_block_tables` show them; see `LLMEngine`."""
        return self.remote.streams.sequences_of([request_id])

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = False,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """Stop computing at a step boundary; returns when that is so. See `LLMEngine.pause_generation`."""
        mode = "wait" if wait_for_inflight_requests else mode
        with self.remote.spans.during("pause", mode=mode):
            await self._call("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        await self._call("resume_generation")

    async def is_paused(self) -> bool:
        """Whether a pause is in force (also while asleep)."""
        return await self._call("is_paused", bool)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Return when the core has nothing in flight, of any client.

        Raises `DrainTimeoutError` (a `TimeoutError`) after `drain_timeout` seconds, `LifecycleError` when requests are
        frozen and so cannot finish. Requests that wait for resume or wake-up do not count.
        """
        try:
            await asyncio.wait_for(self._call("wait_for_requests_to_drain"), drain_timeout)
        except TimeoutError:
            what = f"requests are still in flight after {drain_timeout:g} seconds"
            raise DrainTimeoutError(f"wait_for_requests_to_drain: {what}; they go on.") from None

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give memory back to the system; see `LLMEngine.sleep`."""
        await self._call("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back: "weights", "kv_cache", or None for all."""
        await self._call("wake_up", tags=[tags] if isinstance(tags, str) else None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether some memory is still released."""
        return await self._call("is_sleeping", bool)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every known prefix, and return whether that was done; see `LLMEngine.reset_prefix_cache`."""
        return await self._call("reset_prefix_cache", bool, reset_running_requests=reset_running_requests)

    async def get_metrics(self) -> EngineMetrics:
        """Counters and gauges of the core, timings of this client's requests."""
        return EngineMetrics(core=await self._call("get_core_metrics", CoreMetrics), requests=self.remote.streams.stats)

    async def do_log_stats(self) -> None:
        """Show the metrics to every stat logger now."""
        self.remote.client.require_own_process()
        await asyncio.to_thread(self.remote.stat_thread.write)

    async def score(
        self,
        prompt_token_ids: Sequence[list[int]],
        completion_token_ids: Sequence[list[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-probs of given completions under the live weights: per sequence float32 [len(completion)]."""
        return await asyncio.wrap_future(self.remote.score(prompt_token_ids, completion_token_ids, temperature))

    async def update_weights(
        self,
        source: WeightSource,
        *,
        version: int | None = None,
        mode: UpdateMode = "keep",
        kv: KvMode = "keep",
        staging: Staging = "auto",
        transport: str | None = None,
        reset_version: bool = False,
        allow_nonfinite: bool = False,
        timeout: float = 300,
        partial: bool = False,
    ) -> UpdateReport:
        """Replace the live weights between two steps, wholly or not at all; see `LLMEngine.update_weights`.

        `source` is read in a thread and its tensors must keep their values until this returns; a path is read by the
        core. `transport` is how the weights reach the core: "shm" (shared memory, the default), "store", "gloo", or
        "ipc" where they are on the CUDA device that the core uses too.
        """
        options = UpdateOptions.checked(
            mode=mode,
            kv=kv,
            staging=staging,
            transport=transport,
            reset_version=reset_version,
            allow_nonfinite=allow_nonfinite,
            timeout=timeout,
            partial=partial,
        )
        return await asyncio.to_thread(self.remote.update_weights, source, plain(version), options)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of a worker extension on every rank, between two steps; see `LLMEngine.collective_rpc`.

        Arguments and results are numbers, text, lists, dicts, arrays and tensors: these travel without a copy, structs
        arrive as dicts and tuples as lists. `RPCError` names what cannot travel.
        """
        call = checked_call(method, timeout, args, kwargs)
        with self.remote.spans.during("collective_rpc", method=method):
            result = asyncio.wrap_future(ask(self.remote.client, *call, timeout))
            try:
                if not (await asyncio.wait([result], timeout=timeout))[0]:
                    raise timed_out(method, timeout or 0.0, begun=None)
            finally:
                result.cancel()
            return result.result()

    async def get_model_metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight."""
        return await self._call("get_model_metadata", dict[str, tuple[str, tuple[int, ...]]])

    async def get_cache_usage(self) -> float:
        """KV blocks referenced by live requests / all blocks."""
        return await self._call("get_cache_usage", float)

    async def get_num_unfinished_requests(self) -> int:
        """Requests of all clients that the core has not ended."""
        return await self._call("get_num_unfinished_requests", int)

    async def check_health(self) -> Health:
        """Ask the core's busy loop for a sign of life. Raises `EngineDeadError` when it is gone."""
        return await self._call("check_health", Health)

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        return self.remote.get_tokenizer()

    async def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the checkpoint's generation_config.json recommends; nothing applies them by itself."""
        return self.remote.inputs.default_params()

    @property
    def policy_version(self) -> int:
        """Version of the live weights, as last heard."""
        return self.remote.streams.policy_version

    @property
    def address(self) -> str:
        """Where `connect` finds this engine's core: a directory that only this user may enter."""
        return self.remote.client.directory

    @property
    def client_index(self) -> int:
        """Which client of its core this is, from 0."""
        return self.remote.client.client_index

    @property
    def is_running(self) -> bool:
        """Whether the core lives."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether the core is gone, or this engine was shut down."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether requests raise `dead_error`."""
        return self.remote.client.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """What requests raise once the core is gone."""
        return self.remote.client.dead_error or EngineDeadError("The engine's core is gone.")

    def shutdown(self) -> None:
        """End the core, or leave it if it is another engine's; open requests raise. Calling it again is a no-op.

        It also happens when the engine is garbage or the interpreter ends.
        """
        self.remote.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _call(self, name: str, kind: Any = None, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self.remote.call(name, kind, **arguments))


AsyncLLMEngine = AsyncLLM
