"""verl's rollouts by this engine: `actor_rollout_ref.rollout.name=rollout_engine`.

    EngineReplica   starts one server for each replica, or finds it, and an actor that verl calls
    EngineActor     that actor: verl's calls become requests of the server
    EngineRollout   in each worker of the trainer: sends it the worker's weights

A weight update has verl's `global_steps` as its version, and every token has the version that made it.
"""

import base64
import os
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from envs_adapters.trainers.verl_server import ENGINE_KWARGS, ServerClient, ServerProcess, ServerSettings
from envs_adapters.trainers.verl_teacher import is_scoring, scored_fields, scoring_body

_KV, _WEIGHTS = "kv_cache", "weights"


class EngineActor:
    """The replica's interface for verl: a Ray actor next to the server."""

    def __init__(self, config: Any, model: str, replica_rank: int) -> None:
        self._config, self._model, self._rank = config, model, replica_rank
        self._settings = ServerSettings(_engine_kwargs(config))
        self._process: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._rejects = self._is_paused = False
        self._global_steps: int | None = None

    async def launch(self) -> str:
        """Start the server, or find it. Returns host:port."""
        address = self._settings.address_of(self._rank)
        if address is None:
            options = _engine_options(self._config) | self._settings.options
            mode = (self._config.get("logprobs_mode", None) or "tempered").removesuffix("_logprobs")
            self._process = ServerProcess(self._settings.python, self._model, options, mode)
            address = self._process.address
        self._client = ServerClient(address, self._process)
        await self._client.wait_until_up()
        return address

    def close(self) -> None:
        """End the server, if it was started here."""
        if self._process is not None:
            self._process.close()

    @property
    def server(self) -> ServerClient:
        assert self._client is not None, "launch comes first"
        return self._client

    def get_server_address(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Tokens in, tokens out; while generation is paused the request waits, or is turned away.

        Raises `ValueError` for videos and sounds, for images that are not PIL's or have settings for their processor,
        and for a prompt that leaves no room.
        """
        if video_data or audio_data:
            raise ValueError("This adapter serves text and images: video_data and audio_data must be empty.")
        if image_data and mm_processor_kwargs:
            raise ValueError("The checkpoint's files set how images are processed: mm_processor_kwargs must be empty.")
        if self._is_paused and self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps})
        if is_scoring(sampling_params):
            return await self._score(prompt_ids, sampling_params, request_id)
        settings = self._sampling(dict(sampling_params), len(prompt_ids))
        body = {
            "input_ids": [int(token) for token in prompt_ids],
            "sampling_params": settings,
            "return_logprob": bool(sampling_params.get("logprobs", False)),
            "rid": request_id,
            "priority": priority,
            "return_routed_experts": bool(self._config.get("enable_rollout_routing_replay", False)),
        }
        if image_data:
            body["image_data"] = [_data_url(image) for image in image_data]
        answer = await self.server.generate(body)
        meta = answer["meta_info"]
        logprobs = meta.get("output_token_logprobs")
        reason = meta["finish_reason"]["type"]
        return TokenOutput(
            token_ids=answer["output_ids"],
            log_probs=None if logprobs is None else [entry[0] for entry in logprobs],
            routed_experts=_routed_experts(meta),
            stop_reason="aborted" if reason == "abort" else "completed",
            extra_fields=self._versions(meta) | {"num_cached_tokens": meta.get("cached_tokens")},
        )

    async def _score(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> TokenOutput:
        """Answer a request of a distillation teacher: log-probs of its prompt."""
        answer = await self.server.score(scoring_body(prompt_ids, sampling_params, request_id))
        [choice] = answer["choices"]
        return TokenOutput(
            token_ids=choice["token_ids"],
            stop_reason="completed",
            extra_fields=scored_fields(answer, prompt_ids, sampling_params) | {"global_steps": self._global_steps},
        )

    def _sampling(self, given: dict[str, Any], num_prompt: int) -> dict[str, Any]:
        """verl's sampling settings as the server takes them."""
        for name in ("thinking_budget", "thinking_token_budget", "custom_params"):
            if given.get(name) is not None:
                raise ValueError(f"{name} is not served to verl, which would train on the tokens that a budget forces.")
        config = self._config
        room = config.max_model_len - num_prompt if config.max_model_len else None
        if room is not None and room < 1:
            raise ValueError(f"A prompt of {num_prompt} tokens leaves no room in max_model_len={config.max_model_len}.")
        limit = given.pop("max_tokens", None) or given.pop("max_new_tokens", None)
        if limit is None:
            limit = min(config.response_length, config.prompt_length + config.response_length - num_prompt)
        given.pop("max_new_tokens", None)
        given.pop("logprobs", None)
        given["max_new_tokens"] = max(1, limit if room is None else min(limit, room))
        given.setdefault("ignore_eos", bool(config.get("ignore_eos", False)))
        if config.get("full_determinism", False):
            given.setdefault("sampling_seed", self._rank + config.seed)
        return given

    def _versions(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The versions that made the tokens; verl reads `global_steps`."""
        spans = [int(span["version"]) for span in meta.get("weight_versions") or []] or [int(meta["weight_version"])]
        steps = None if self._global_steps is None else max(spans)
        return {"global_steps": steps, "min_global_steps": min(spans), "max_global_steps": max(spans)}

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.server.control("/resume_memory_occupation", tags=tags or [_KV, _WEIGHTS])

    async def sleep(self) -> None:
        await self.server.control("/release_memory_occupation", tags=[_KV, _WEIGHTS])

    async def release_kv_cache(self) -> None:
        await self.server.control("/release_memory_occupation", tags=[_KV])

    async def resume_kv_cache(self) -> None:
        await self.server.control("/resume_memory_occupation", tags=[_KV])

    async def clear_kv_cache(self) -> None:
        await self.server.control("/flush_cache")

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End requests in flight with the tokens they have; later ones wait for `resume_generation`, or are aborted."""
        self._is_paused, self._rejects = True, reject_request
        await self.server.control("/pause_generation", mode="abort")
        return {"aborted_count": 0, "request_ids": []}  # the server does not count them

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        await self.server.control("/abort_request", rid=request_id)
        return {"aborted": True, "request_id": request_id}

    async def resume_generation(self) -> None:
        self._is_paused = self._rejects = False
        await self.server.control("/continue_generation")

    def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def start_profile(self, **options: Any) -> None:
        await self.server.control("/start_profile", **options)

    async def stop_profile(self) -> None:
        await self.server.control("/stop_profile")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return await self.server.control(
            "/collective_rpc", method=method, timeout=timeout, args=list(args), kwargs=kwargs or {}
        )


class EngineReplica(RolloutReplica):  # type: ignore[misc]
    """One replica: one server and its actor. Tensors are not cut over ranks, so its world size is 1."""

    async def init_standalone(self) -> None:
        """Start a replica of its own. If weights arrive by verl's "naive" engine, or not at all, it needs no GPU."""
        if self.config.checkpoint_engine.backend != "naive":
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the server and its actor on this node, or on the first worker's."""
        if self.world_size != 1:
            raise ValueError(
                f"One replica of this engine has one rank, not {self.world_size}: set tensor_model_parallel_size, "
                "data_parallel_size and pipeline_model_parallel_size to 1, and have more replicas."
            )
        node = ray.get_runtime_context().get_node_id()
        if self.workers:
            node = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options = {"name": actor_name(self.replica_rank), "max_concurrency": self.max_concurrency, "num_cpus": 0}
        actor: Any = ray.remote(EngineActor).options(scheduling_strategy=where, **options)
        model = getattr(self.model_config, "local_path", None) or self.model_config.path
        handle = actor.remote(self.config, model, self.replica_rank)
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = await handle.launch.remote()


class EngineRollout(BaseRollout):  # type: ignore[misc]
    """In a worker of the trainer: releases the replica's memory, and sends it the worker's weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **more: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank
        self.is_leader_rank = True

    async def _server(self) -> ServerClient:
        """A client for one operation: the next one may run on another event loop."""
        host, port = await ray.get_actor(actor_name(self.replica_rank)).get_server_address.remote()
        return ServerClient(f"{host}:{port}")

    async def resume(self, tags: list[str]) -> None:
        """Take memory back: "weights", "kv_cache"."""
        if self.config.free_cache_engine:
            async with await self._server() as server:
                await server.control("/resume_memory_occupation", tags=list(tags))

    async def release(self) -> None:
        """Give the memory of KV and weights back; an update must bring the weights again."""
        if self.config.free_cache_engine:
            async with await self._server() as server:
                await server.control("/release_memory_occupation", tags=[_KV, _WEIGHTS])

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **more: Any,
    ) -> None:
        """Send (name, tensor) pairs in bounded pieces, as one update: the engine changes over once all have arrived.

        Raises `ValueError` for adapters and for deltas, and `RuntimeError` if the server refuses; then the old
        weights continue to serve.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r} is not served: use a checkpoint engine that sends tensors.")
        if more.get("peft_config") and more.get("base_sync_done"):
            raise ValueError("Adapters are not sent alone: set actor_rollout_ref.model.lora.merge=True.")
        room = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async with await self._server() as server:
            await server.control("/begin_weight_update")
            async for piece in _pieces(weights, room):
                await server.send_tensors(piece)
            await server.control("/end_weight_update", weight_version=global_steps)
        if global_steps is not None:
            await ray.get_actor(actor_name(self.replica_rank)).set_global_steps.remote(global_steps)


async def _pieces(weights: Any, room: int) -> AsyncIterator[dict[str, Any]]:
    """Copies of (name, tensor) pairs, each of at most `room` bytes or one tensor; the generator may reuse memory."""
    held: dict[str, Any] = {}
    size = 0
    async for name, tensor in _each(weights):
        if held and size + tensor.nbytes > room:
            yield held
            held, size = {}, 0
        held[name] = tensor.detach().cpu().clone()
        size += tensor.nbytes
    if held:
        yield held


async def _each(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """The pairs of a generator of either kind: verl has both."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def actor_name(replica_rank: int) -> str:
    """Name of a replica's actor."""
    return f"rollout_engine_server_{replica_rank}"


def _data_url(image: Any) -> str:
    """An image of PIL as the text of a PNG, which keeps all of its pixels."""
    if not type(image).__module__.startswith("PIL."):
        raise ValueError(f"image_data must hold images of PIL, as verl reads them, not {type(image).__name__}.")
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _routed_experts(meta: dict[str, Any]) -> Any:
    """int16 [T, L, k]: experts of each token but the last in the L layers with a router; None if not asked for."""
    if "routed_experts" not in meta:
        return None
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    return found.astype(np.int16).reshape(meta["routed_experts_shape"])


def _engine_kwargs(config: Any) -> Any:
    return (config.get("engine_kwargs", None) or {}).get(ENGINE_KWARGS, None)


def _engine_options(config: Any) -> dict[str, Any]:
    """The engine's options that verl has settings for."""
    options: dict[str, Any] = {"dtype": config.dtype, "max_num_seqs": config.max_num_seqs}
    if config.max_model_len:
        options["max_model_len"] = config.max_model_len
    if config.get("load_format", "auto") == "dummy":
        options["load_format"] = "dummy"
    return options
