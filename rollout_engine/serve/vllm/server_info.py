"""What trainers ask about the server, in the shapes of both dialects."""

from importlib.metadata import version
from typing import Any

import msgspec

from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


class InfoBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    config_format: str | None = None


async def server_info(served: Served, asked: Asked) -> Reply:
    """The engine's configuration: vLLM's `vllm_config`, and SGLang's flat fields."""
    info = served.engine.frontend.client.info
    config = info.config
    num_ranks = config.tensor_parallel_size
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
        "parallel_config": {"world_size": num_ranks, "tensor_parallel_size": num_ranks, "data_parallel_size": 1},
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
        "tp_size": num_ranks,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "internal_states": [{"weight_version": served.version_text}],
    }
    about = {"engine": "rollout-engine", "version": version("rollout-engine"), "weight_version": served.weight_version}
    engine_config = msgspec.to_builtins(config) | {"block_size": info.block_size}  # a number, which clients read
    return Reply({**flat, **about, "vllm_config": vllm_config, "engine_config": engine_config})
