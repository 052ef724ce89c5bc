"""The blocking engine over replicas, with the names of TorchRL's AsyncVLLM for methods that it has too."""

import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, LifecycleError, refused
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.metrics import StatLogger
from rollout_engine.base.outputs import PoolingRequestOutput, RequestOutput
from rollout_engine.base.pooling_params import PoolingLike, pooling_only
from rollout_engine.base.sampling_params import SamplingLike
from rollout_engine.base.threads import run_in_thread
from rollout_engine.base.version_pin import with_versions
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.verb import Arguments
from rollout_engine.engine.verbs import VERBS
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.generate_run import agenerate, generate_all
from rollout_engine.faces.load_balancer import LoadBalancer
from rollout_engine.faces.replica_methods import ReplicaMethods, fleet_of, require_replica
from rollout_engine.faces.verb_methods import BlockingVerbs, wait_for
from rollout_engine.fleet.placements import fleet_starter
from rollout_engine.fleet.plan.balancer import Balancer, BalancerStats, StrategyName
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.replica_health import ReplicaHealth
from rollout_engine.telemetry.spans import TraceHeaders
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.prompts import Prompt, check_chat_arguments, chosen_prompts, with_chat_options, with_lora

Strategies = StrategyName | Sequence[StrategyName]


class RolloutService(ReplicaMethods, BlockingVerbs):
    """Replicas of one model behind one object: the methods of `LLM` over many engines.

    >>> with RolloutService.from_pretrained("path/or/hub-id", num_replicas=2) as service:
    ...     outputs = service.generate(["Once upon a time"], SamplingParams(max_tokens=16))
    ...     service.update_weights(trainer)

    Any thread may call any method, and several may generate at once; several services may live in one process. A
    replica that is lost is started again, and its requests continue at others, to the same tokens. Verbs not described
    here are those of `LLM`, and concern all replicas. docs/fleet.md has a table for users of AsyncVLLM.
    """

    def __init__(self, frontend: Frontend) -> None:
        """Wrap a front end over a `FleetClient`; `launch` and `from_pretrained` make both. Raises `ConfigError`."""
        client = getattr(frontend, "client", None)
        if not isinstance(client, FleetClient):
            raise ConfigError(refused("frontend", frontend, "over a FleetClient", "RolloutService.launch makes one."))
        self.frontend = frontend

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        num_replicas: int = 1,
        *,
        balancer: Strategies = ("prefix-aware", "requests"),
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
        placement: str = "processes",
        ray_address: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> Self:
        """Start replicas and wait until all are loaded.

        Args:
            config: of each replica.
            balancer: how requests find their replica, in fallback order, with `prefix_length` and
                `overload_threshold`: see `LoadBalancer`.
            placement: "processes" of this machine or actors of a "ray" cluster, with `ray_address`: see `AsyncLLM`.
            stat_loggers: as in `LLMEngine.from_config`.

        Raises `ConfigError` if there is no room for them, or the model cannot be served; nothing is left then.
        """
        if not isinstance(config, EngineConfig):
            hint = "RolloutService.from_pretrained takes a path and options."
            raise ConfigError(refused("config", config, "an EngineConfig", hint))
        routing = Balancer(balancer, prefix_length=prefix_length, overload_threshold=overload_threshold)
        start = fleet_starter(num_replicas=num_replicas, placement=placement, ray_address=ray_address, balancer=routing)
        return cls(Frontend.start(config, start, stat_loggers))

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        *,
        balancer: Strategies = ("prefix-aware", "requests"),
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
        placement: str = "processes",
        ray_address: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        **engine_kwargs: Any,
    ) -> Self:
        """Start replicas of a checkpoint directory or hub id; `engine_kwargs` are `EngineConfig`'s.

        `num_devices`: of each replica, its `tensor_parallel_size`; None: 1. `verbose`: log a line of statistics now and
        then (`log_stats`). The other options as for `launch`. Raises `ConfigError`.
        """
        if num_devices is not None:
            given = engine_kwargs.setdefault("tensor_parallel_size", num_devices)
            if given != num_devices:
                what = f"num_devices={num_devices} and tensor_parallel_size={given}"
                raise ConfigError(f"{what} are both set, and mean the same. Give one of them.")
        options: Any = dict(balancer=balancer, prefix_length=prefix_length, overload_threshold=overload_threshold)
        options |= dict(placement=placement, ray_address=ray_address, stat_loggers=stat_loggers)
        config = EngineConfig.from_kwargs(model=model, **{"log_stats": verbose, **engine_kwargs})
        return cls.launch(config, num_replicas, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        timeout_seconds: float | None = None,
        replica_index: int | None = None,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """One finished `RequestOutput` per prompt, in order, as from `LLM.generate`.

        Args:
            prompts: one prompt or a list of them, of any kind that `LLM` takes.
            sampling_params: one for all prompts, or a list with one each.
            prompt_token_ids: token ids of one prompt, or a list of such, instead of `prompts`.
            use_tqdm: show a progress bar.
            timeout_seconds: how long each request may take. Requests that have not ended then are aborted, and
                `GenerateTimeoutError` reports their tokens so far; it has the outputs that were complete.
            replica_index: the replica that is to begin with them; if it is lost, they continue at others. None:
                the balancer chooses for each prompt.
            priority, session_id, lora_request, trace_headers, policy_version, min_policy_version, chat: as for
                `LLM.generate`.

        Raises `RequestError`, nothing queued; `RetryableError` if the replica of that index takes no requests now;
        `LifecycleError` while paused or asleep.
        """
        given = chosen_prompts(prompts, prompt_token_ids)
        options: Any = dict(replica_index=replica_index, lora_request=lora_request, timeout_seconds=timeout_seconds)
        options |= dict(use_tqdm=use_tqdm, priority=priority, session_id=session_id, trace_headers=trace_headers)
        params = with_versions(sampling_params, policy_version, min_policy_version)
        return generate_all(self.frontend, self.generate, given, params, chat, **options)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        timeout_seconds: float | None = None,
        replica_index: int | None = None,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """`generate` for an event loop, which stays free; cancelling it aborts the requests.

        While the service is paused or asleep it waits for another task to resume it, or is turned away, by
        `EngineConfig.admission`.
        """
        given = chosen_prompts(prompts, prompt_token_ids)
        check_chat_arguments(chat, self.agenerate)
        require_replica(self.frontend, replica_index)
        prompts = with_lora(with_chat_options(given, chat), lora_request)
        if lora_request is not None:
            await run_in_thread(self.frontend.ensure_loras, lora_request)
        options: Any = dict(replica_index=replica_index, timeout_seconds=timeout_seconds, priority=priority)
        options |= dict(session_id=session_id, trace_headers=trace_headers)
        params = with_versions(sampling_params, policy_version, min_policy_version)
        return await agenerate(self.frontend, prompts, params, **options)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingLike | Sequence[PoolingLike] | None = None,
        *,
        use_tqdm: bool = True,
        timeout_seconds: float | None = None,
        replica_index: int | None = None,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        **chat: Unpack[ChatOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool each prompt, as `LLM.encode` does: one output each, in order.

        Other arguments and errors as in `generate`.
        """
        params = pooling_only(pooling_params)
        options: Any = dict(replica_index=replica_index, lora_request=lora_request, timeout_seconds=timeout_seconds)
        options |= dict(use_tqdm=use_tqdm, priority=priority, session_id=session_id, trace_headers=trace_headers)
        found = generate_all(self.frontend, self.encode, prompts, params, chat, **options)
        return [PoolingRequestOutput.of(output) for output in found]

    def create_load_balancer(
        self, strategy: Strategies | None = None, prefix_length: int = 8, overload_threshold: float = 1.5
    ) -> LoadBalancer:
        """Make a `LoadBalancer` over these replicas, for `generate(..., replica_index=...)`.

        `strategy=None`: ("prefix-aware", "requests"). Requests without `replica_index` are routed as set in `launch`.
        """
        chosen = ("prefix-aware", "requests") if strategy is None else strategy
        options: Any = dict(prefix_length=prefix_length, overload_threshold=overload_threshold)
        return LoadBalancer(self, chosen, **options)

    def get_balancer_stats(self) -> BalancerStats:
        """How the service itself has routed requests so far, and the requests in flight per replica."""
        return self._fleet.calls.balancer_stats()

    def get_num_unfinished_requests(self, replica_index: int | None = None, *, timeout: float | None = None) -> int:
        """Requests that the core of a replica has not ended; None: of all replicas together.

        `timeout` as in `LLM.get_cache_usage`.
        """
        return int(self._call("get_num_unfinished_requests", {"timeout": timeout}, replica_index, self._fleet.call))

    def get_cache_usage(self, replica_index: int | None = None, *, timeout: float | None = None) -> float:
        """KV blocks referenced by live requests / all blocks of a replica; None: the mean over replicas.

        `timeout` as in `LLM.get_cache_usage`.
        """
        return float(self._call("get_cache_usage", {"timeout": timeout}, replica_index, self._fleet.call))

    def collective_rpc(  # type: ignore[override]  # results by replica
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        replica_index: int | None = None,
    ) -> dict[int, list[Any]]:
        """Call a method of a worker extension on every rank of every replica, or of one; results by replica and rank.

        Otherwise as `LLM.collective_rpc`. Raises `RetryableError` if a replica is lost before it has answered, and
        `LifecycleError` for methods that would change weights past the fleet: use `update_weights`.
        """
        arguments = VERBS["collective_rpc"].bind((method, timeout, args, kwargs), {})
        results = self._call("collective_rpc", arguments, replica_index, self._fleet.calls.on_each)
        return dict(results) if replica_index is None else {replica_index: results}

    def init_weight_update_group(self, master_address: str, master_port: int) -> None:
        """Not possible over replicas, and not needed: raises `LifecycleError`. Call `update_weights` alone.

        `update_weights` publishes the weights once, every replica reads them there, and one that starts later does too;
        in a process group that a trainer has formed, a replica that is started again would have no place.
        """
        raise LifecycleError(
            "init_weight_update_group: the replicas of a fleet form no process group with the trainer, since one that "
            "is started again could not join it. Leave this call out: update_weights(model) needs no group, and "
            "reaches every replica."
        )

    def get_tp_size(self) -> int:
        """Ranks of each replica (`tensor_parallel_size`)."""
        return self.frontend.client.info.config.tensor_parallel_size

    def get_master_address(self) -> str:
        """Address at which replicas reach this process: "127.0.0.1" if all run on this machine."""
        here = platform.node()
        if all(each.node in ("", here) for each in self.health()):
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # an address of no machine (RFC 5737); nothing is sent
            except OSError:  # a machine without a network
                return "127.0.0.1"
            return str(probe.getsockname()[0])

    def get_master_port(self) -> int:
        """A TCP port of this machine that is free now; each call may return another one."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def health(self) -> list[ReplicaHealth]:
        """The same as `replicas`."""
        return self.replicas()

    @property
    def _fleet(self) -> FleetClient:
        return fleet_of(self.frontend)

    def _call(
        self, name: str, arguments: Arguments, replica_index: int | None, call: Callable[[str, Arguments], CallFuture]
    ) -> Any:
        """Call a verb on one replica, or on all of them by `call`, and wait for its result."""
        if replica_index is not None:
            call = partial(self._fleet.calls.on_one, replica_index)
        return wait_for(self.frontend, VERBS[name], arguments, lambda: call(name, arguments))


make_rollout_service = RolloutService.from_pretrained
