"""The asynchronous engine: requests as async generators, by default over a core in a process of its own."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, Unpack

from rollout_engine.base.beam_search import BeamSearchOutput, BeamSearchParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, LifecycleError, RequestError
from rollout_engine.base.lora_request import LoRALike, LoRARequest
from rollout_engine.base.metrics import StatLogger
from rollout_engine.base.outputs import PoolingRequestOutput, RequestOutput
from rollout_engine.base.pooling_params import PoolingLike, as_pooling_params, refuse_pooling
from rollout_engine.base.sampling_params import SamplingLike
from rollout_engine.base.threads import run_in_thread
from rollout_engine.base.version_pin import with_versions
from rollout_engine.engine.client import EngineClient
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.beam_search import BeamSearches
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.generate_run import agenerate
from rollout_engine.faces.loop_waker import LoopWaker
from rollout_engine.faces.replica_methods import AsyncReplicaMethods
from rollout_engine.faces.verb_methods import AsyncVerbs, Face
from rollout_engine.fleet.placements import client_starter, connect_client
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import HANG_SECONDS, START_SECONDS, ProcessClient
from rollout_engine.results.open_streams import Stream
from rollout_engine.telemetry.spans import TraceHeaders
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.input_processor import Params
from rollout_engine.text.prompts import Prompt, check_chat_arguments, with_chat_options, with_lora


class AsyncLLM(AsyncReplicaMethods, AsyncVerbs):
    """An engine whose core runs in a process of its own. Keyword arguments are `EngineConfig`'s.

    `num_replicas`: number of such cores. One that is lost is started again, and its requests continue at the
    others. `placement`: "processes" of this machine, or actors of a "ray" cluster, by default the one that this process
    is connected to or that runs on this machine, or else a new one; `ray_address` ("HOST:PORT") names another.

    >>> engine = AsyncLLM("path/or/hub-id")
    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=16)):
    ...     print(output.outputs[0].text)

    It can be made inside or outside an event loop, and used from any loop, several at a time. Every request ends in one
    finished `RequestOutput` or one error; when the core dies, all open requests raise `EngineDeadError` at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        num_replicas: int = 1,
        placement: str = "processes",
        ray_address: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        **engine_kwargs: Any,
    ) -> None:
        config = EngineConfig.from_kwargs(model=model, **engine_kwargs)
        start = client_starter(num_replicas=num_replicas, placement=placement, ray_address=ray_address)
        self.frontend = Frontend.start(config, start, stat_loggers)

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

        `hang_seconds`: a core whose process gives no sign of life for so long is killed. Long steps do not count, nor
        calls into C: the heartbeat is a native thread. `start_seconds`: how long loading may take. `stat_loggers` as in
        `LLMEngine.from_config`; they run in this process.
        """
        start = partial(ProcessClient.start, hang_seconds=hang_seconds, start_seconds=start_seconds)
        return cls._standing_on(Frontend.start(config, start, stat_loggers))

    @classmethod
    def from_client(cls, client: EngineClient) -> Self:
        """Wrap a client of an engine that steps on its own. Raises `LifecycleError` for one that does not."""
        if client.needs_turns:
            what = "AsyncLLM: nobody would compute: a client of an engine in this process needs a thread of its own"
            raise LifecycleError(f"{what}, LocalClient.start(config, own_thread=True).")
        return cls._standing_on(Frontend.over(client))

    @classmethod
    def from_engine(cls, engine: Face) -> Self:
        """Wrap an engine that has another face: requests, results and `shutdown` are shared with it.

        An engine in this process whose steps its callers compute gets a thread of its own that computes them.
        """
        if isinstance(engine, cls):
            return engine
        client = engine.frontend.client
        if isinstance(client, LocalClient):
            client.begin_thread()
        return cls._standing_on(engine.frontend)

    @classmethod
    def connect(
        cls,
        address: str | Sequence[str],
        *,
        key_file: str | os.PathLike[str] | None = None,
        hang_seconds: float = HANG_SECONDS,
    ) -> Self:
        """Connect another client to the core of an engine, of the same user on this machine, or anywhere over TCP.

        `address` is that engine's, or the "tcp://HOST:PORT" that `rollout-engine core` has printed, with a copy of its
        `key_file`; nothing goes over TCP unencrypted. Clients do not see each other's requests; `shutdown` leaves the
        core to its owner, and ends this client's requests. Raises `EngineDeadError`, and `ConfigError` for a file or
        an address that cannot be used.

        A list of addresses: their cores, of one configuration and the same weights, become a fleet's replicas. No one
        else may update their weights then. One that is lost is looked for at its address for ten minutes.
        """
        keys = None if key_file is None else Keys.read(key_file)
        return cls.from_client(connect_client(address, keys=keys, hang_seconds=hang_seconds))

    @classmethod
    def _standing_on(cls, frontend: Frontend) -> Self:
        engine = cls.__new__(cls)
        engine.frontend = frontend
        return engine

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingLike | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        session_id: str | None = None,
        lora_request: LoRALike | None = None,
        trace_headers: TraceHeaders | None = None,
        data_parallel_rank: int | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, by `output_kind`; the last output has `finished=True`.

        A reader slower than the engine gets everything since its last output at once. Leaving the iteration,
        cancelling it, dropping the generator or closing its event loop aborts the request. Lower `priority` runs first.
        Raises `RequestError`, nothing queued, and `EngineDeadError`. `session_id`, `trace_headers` as in
        `LLMEngine.add_request`, `lora_request`, `policy_version`, `min_policy_version` and `chat` as in `LLM.generate`.
        `data_parallel_rank`: the index of the replica that is to begin with the request; if it is lost, another one
        continues. None: the balancer chooses. `RetryableError` while that replica takes no requests. An engine without
        replicas has rank 0 alone.
        """
        check_chat_arguments(chat, self.generate)
        refuse_pooling(sampling_params)
        options: Any = dict(lora_request=lora_request, data_parallel_rank=data_parallel_rank, priority=priority)
        options |= dict(session_id=session_id, trace_headers=trace_headers)
        params = with_versions(sampling_params, policy_version, min_policy_version)
        async with aclosing(self._outputs(prompt, params, request_id, chat, **options)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | dict[str, Any],
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """`LLM.beam_search` in an event loop, which stays free."""
        given = prompts, params, lora_request, concurrency_limit
        search = await run_in_thread(BeamSearches.begin, self.frontend, *given)
        while asked := search.prompts:
            search.extend(await agenerate(self.frontend, asked, search.sampling_params))
        return search.outputs(self.frontend)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingLike | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        session_id: str | None = None,
        lora_request: LoRALike | None = None,
        trace_headers: TraceHeaders | None = None,
        data_parallel_rank: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool one prompt, as `LLM.encode` does; yields one output, with `finished=True`.

        Leaving, arguments and errors as in `generate`.
        """
        check_chat_arguments(chat, self.encode)
        params = as_pooling_params(pooling_params)
        options: Any = dict(lora_request=lora_request, data_parallel_rank=data_parallel_rank, priority=priority)
        options |= dict(session_id=session_id, trace_headers=trace_headers)
        async with aclosing(self._outputs(prompt, params, request_id, chat, **options)) as outputs:
            async for output in outputs:
                yield PoolingRequestOutput.of(output)

    def _replica_of(self, data_parallel_rank: int | None) -> int | None:
        """The replica of a rank; None without one. Raises `RequestError`, and `RetryableError` if it does not serve."""
        client = self.frontend.client
        if data_parallel_rank is None:
            return None
        if isinstance(client, FleetClient):
            client.calls.require_serving(data_parallel_rank, "data_parallel_rank")
            return data_parallel_rank
        if type(data_parallel_rank) is not int or data_parallel_rank != 0:
            bound = "0 or None for an engine without replicas (num_replicas)"
            raise RequestError.for_field("data_parallel_rank", data_parallel_rank, bound)
        return None

    async def _outputs(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        chat: ChatOptions,
        *,
        lora_request: LoRALike | None,
        data_parallel_rank: int | None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; `options` of `Frontend.add_request`. Closing the generator aborts it."""
        prompt = with_lora(with_chat_options(prompt, chat), lora_request)
        if isinstance(lora_request, LoRARequest) and lora_request.has_values:
            await run_in_thread(self.frontend.ensure_loras, lora_request)
        options["replica_index"] = self._replica_of(data_parallel_rank)
        if self.frontend.inputs.has_new_rules(params):
            await run_in_thread(self.frontend.inputs.try_rules, params)
        if self.frontend.inputs.has_images(prompt):
            prompt = await run_in_thread(self.frontend.inputs.read_images, prompt)
        waker, event = LoopWaker.of(asyncio.get_running_loop()), asyncio.Event()
        stream = self.frontend.add_request(
            prompt, params, request_id, lambda stream: self._wake(stream, waker, event), **options
        )
        finished = False
        try:
            while not finished:
                event.clear()
                output = self.frontend.take(stream)
                if output is None:
                    await event.wait()
                else:
                    finished = output.finished
                    yield output
        finally:
            self.frontend.close(stream)

    def _wake(self, stream: Stream, waker: LoopWaker, event: asyncio.Event) -> None:
        if not waker.wake(event):
            self.frontend.close(stream)
            what = "generate: the event loop in which this request was read is closed, and the request was aborted"
            stream.error = LifecycleError(f"{what}: read a request to its end in one loop.")

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: their generators yield the output so far, with finish_reason "abort". Unknown ids: no-op."""
        self.frontend.abort(request_ids)

    @property
    def address(self) -> str:
        """Directory of the core, for `connect`, which only this user may enter; over TCP the address connected to."""
        return self._process_client.address

    @property
    def client_index(self) -> int:
        """Which client of its core this is, from 0."""
        return self.frontend.client.index

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
        return self.frontend.client.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that requests raise once the core is gone."""
        return self.frontend.client.dead_error or EngineDeadError("The engine's core is gone.")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def _process_client(self) -> ProcessClient:
        client = self.frontend.client
        if not isinstance(client, ProcessClient):
            what = "This engine has not one core in a process of its own"
            raise LifecycleError(f"{what}: no other one can connect to it.")
        return client


AsyncLLMEngine = AsyncLLM
