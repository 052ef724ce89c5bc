"""Routes that report on the server: its health, version, configuration, and the table of routes."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Access, Asked, Reply, Route
from rollout_engine.serve.served import Served

_REFERENCE = "#/components/schemas/{name}"
_KEY = {"bearer": {"type": "http", "scheme": "bearer"}}


async def health(served: Served, asked: Asked) -> Reply:
    """200 while the engine lives; 503 once it is gone, or the server is stopping."""
    problem = served.engine.frontend.client.dead_error
    if problem is not None:
        raise HttpProblem(503, f"The engine is gone: {problem}")
    if served.is_ending:
        raise HttpProblem(503, "The server is stopping.")
    return Reply({"status": "ok", "weight_version": served.weight_version, "is_paused": served.is_paused})


async def health_generate(served: Served, asked: Asked) -> Reply:
    """200 once the engine has answered a call between two of its steps."""
    try:
        report = await served.engine.check_health(timeout=10.0)
    except EngineDeadError as problem:
        raise HttpProblem(503, f"The engine is gone: {problem}") from problem
    return Reply({"status": "ok", "health": report})


async def server_info(served: Served, asked: Asked, *, config_format: str | None = None) -> Reply:
    """The engine's configuration: vLLM's `vllm_config`, and SGLang's flat fields."""
    info = served.engine.frontend.client.info
    config = info.config
    num_ranks, num_stages = config.num_ranks, config.pipeline_parallel_size
    has_loras = config.deterministic is not False and not config.device.startswith("cuda") and num_ranks == 1
    vllm_config: dict[str, Any] = {
        "model_config": {
            "model": config.model,
            "tokenizer": config.tokenizer or config.model,
            "dtype": info.dtype,
            "quantization": config.quantization,
            "max_model_len": info.max_model_len,
            "logprobs_mode": f"{served.options.logprobs_mode}_logprobs",
            "seed": config.seed,
        },
        "cache_config": {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks},
        "parallel_config": {
            "world_size": num_ranks,
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": num_stages,
            "data_parallel_size": config.data_parallel_size,
        },
        "weight_transfer_config": {"backend": "gloo"},
        "lora_config": {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank} if has_loras else None,
    }
    flat = {
        "model_path": served.model_path,
        "served_model_name": served.model,
        "tokenizer_path": config.tokenizer or config.model,
        "dtype": info.dtype,
        "quantization": config.quantization,
        "context_length": info.max_model_len,
        "max_total_num_tokens": info.num_blocks * info.block_size,
        "max_running_requests": config.max_num_seqs,
        "random_seed": config.seed,
        "tp_size": config.tensor_parallel_size,
        "dp_size": config.data_parallel_size,
        "pp_size": num_stages,
        "ep_size": 1,
        "internal_states": [{"weight_version": served.version_text}],
    }
    about = {"engine": "rollout-engine", "version": version("rollout-engine"), "weight_version": served.weight_version}
    engine_config = msgspec.to_builtins(config) | {"block_size": info.block_size}  # a number, which clients read
    return Reply({**flat, **about, "vllm_config": vllm_config, "engine_config": engine_config})


async def get_version(served: Served, asked: Asked) -> Reply:
    """The version of rollout-engine."""
    return Reply({"version": version("rollout-engine")})


async def openapi(served: Served, asked: Asked) -> Reply:
    """This table as an OpenAPI document."""
    return Reply(document(served.routes))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    bodies = list(dict.fromkeys(row.body for row in routes if row.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    of_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        for method in row.methods:
            operation: dict[str, Any] = {
                "operationId": f"{method.lower()}_{row.path.strip('/').replace('/', '_')}",
                "summary": row.help,
                "tags": [row.dialect],
                "responses": {"200": {"description": "Done."}, "default": {"description": "An error."}},
            }
            if row.access is not Access.ANYONE:
                operation["security"] = [{"bearer": []}]
            if row.body is not None and method != "GET":
                operation["requestBody"] = {"content": {"application/json": {"schema": of_body[row.body]}}}
            paths.setdefault(row.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-engine", "version": version("rollout-engine")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEY},
    }
