"""The one table of routes: dialect, method, who may call, and which verb of the engine answers.

The application, the test of who may call what, and docs/server.md come from it.
"""

from typing import Any

from rollout_engine.serve import health, openapi, telemetry
from rollout_engine.serve.openai import chat, completions, models
from rollout_engine.serve.pooling import embeddings, scores
from rollout_engine.serve.pooling.call import IGNORED as POOLING_IGNORED
from rollout_engine.serve.pooling.call import PEERS as POOLING_PEERS
from rollout_engine.serve.route import Access, Dialect, Handler, Route
from rollout_engine.serve.sampling import CHAT_PEERS, IGNORED, SAMPLING_PEERS
from rollout_engine.serve.sglang import adapters
from rollout_engine.serve.sglang import control as sglang
from rollout_engine.serve.sglang import generate as sglang_generate
from rollout_engine.serve.sglang import weights as sglang_weights
from rollout_engine.serve.vllm import control, inference, server_info, weights

_WHO = {"anyone": Access.ANYONE, "client": Access.CLIENT, "admin": Access.ADMIN}
_GENERATION: dict[str, Any] = {"ignored": IGNORED, "neutral": SAMPLING_PEERS}
_POOLING: dict[str, Any] = {"ignored": POOLING_IGNORED, "neutral": POOLING_PEERS}
_CHAT: dict[str, Any] = {"ignored": IGNORED, "neutral": {**SAMPLING_PEERS, **CHAT_PEERS}}


def _row(methods: str, path: str, dialect: Dialect, who: str, handler: Handler, verb: str = "", **more: Any) -> Route:
    return Route(
        path=path, methods=tuple(methods.split()), dialect=dialect, access=_WHO[who], handler=handler, verb=verb, **more
    )


# fmt: off
ROUTES: tuple[Route, ...] = (
    _row("GET", "/health", "openai", "anyone", health.health),
    _row("GET POST", "/ping", "vllm", "anyone", health.health),
    _row("GET", "/liveness", "vllm", "anyone", health.health),
    _row("GET", "/readiness", "vllm", "anyone", health.health),
    _row("GET", "/health_generate", "sglang", "client", health.health_generate, "check_health"),

    _row("GET", "/version", "vllm", "client", openapi.get_version),
    _row("GET", "/openapi.json", "vllm", "client", openapi.openapi),
    _row("GET", "/metrics", "openai", "client", telemetry.metrics, "get_metrics"),
    _row("POST", "/start_profile", "sglang", "admin", telemetry.start_profile, "start_profile",
         body=telemetry.ProfileBody),
    _row("POST", "/stop_profile", "sglang", "admin", telemetry.stop_profile, "stop_profile"),

    _row("GET", "/v1/models", "openai", "client", models.list_models),
    _row("POST", "/v1/completions", "openai", "client", completions.create, "generate",
         body=completions.CompletionBody, **_GENERATION),
    _row("POST", "/v1/chat/completions", "openai", "client", chat.create, "generate", body=chat.ChatBody, **_CHAT),
    _row("POST", "/inference/v1/generate", "vllm", "client", inference.generate, "generate",
         body=inference.InferenceBody, ignored=inference.IGNORED, neutral=inference.PEERS),
    _row("POST", "/v1/embeddings", "openai", "client", embeddings.embeddings, "encode",
         body=embeddings.EmbeddingBody, **_POOLING),
    _row("POST", "/pooling", "vllm", "client", embeddings.pooling, "encode", body=embeddings.PoolingBody, **_POOLING),
    _row("POST", "/classify", "vllm", "client", embeddings.classify, "encode", body=embeddings.ClassifyBody,
         **_POOLING),
    _row("POST", "/score", "vllm", "client", scores.score, "encode", body=scores.ScoreBody, **_POOLING),
    _row("POST", "/v1/score", "vllm", "client", scores.score, "encode", body=scores.ScoreBody, **_POOLING),
    _row("POST", "/rerank", "vllm", "client", scores.rerank, "encode", body=scores.RerankBody, **_POOLING),
    _row("POST", "/v1/rerank", "vllm", "client", scores.rerank, "encode", body=scores.RerankBody, **_POOLING),
    _row("POST", "/v2/rerank", "vllm", "client", scores.rerank, "encode", body=scores.RerankBody, **_POOLING),
    _row("POST", "/tokenize", "vllm", "client", models.tokenize, body=models.TokenizeBody),
    _row("POST", "/detokenize", "vllm", "client", models.detokenize, body=models.DetokenizeBody),
    _row("GET", "/tokenizer_info", "vllm", "client", models.tokenizer_info),

    _row("GET POST", "/server_info", "vllm", "client", server_info.server_info, body=server_info.InfoBody),
    _row("GET", "/load", "vllm", "client", control.load),
    _row("GET", "/get_world_size", "vllm", "client", control.get_world_size),
    _row("POST", "/pause", "vllm", "admin", control.pause, "pause_generation", body=control.PauseBody),
    _row("POST", "/resume", "vllm", "admin", control.resume, "resume_generation"),
    _row("GET", "/is_paused", "vllm", "client", control.is_paused, "is_paused"),
    _row("POST", "/sleep", "vllm", "admin", control.sleep, "sleep", body=control.SleepBody),
    _row("POST", "/wake_up", "vllm", "admin", control.wake_up, "wake_up", body=control.WakeBody),
    _row("POST", "/wakeup", "vllm", "admin", control.wake_up, "wake_up", body=control.WakeBody),
    _row("GET", "/is_sleeping", "vllm", "client", control.is_sleeping, "is_sleeping"),
    _row("POST", "/reset_prefix_cache", "vllm", "admin", control.reset_prefix_cache, "reset_prefix_cache",
         body=control.ResetBody),
    _row("POST", "/abort_requests", "vllm", "admin", control.abort_requests, "abort", body=control.AbortBody),
    _row("POST", "/collective_rpc", "vllm", "admin", control.collective_rpc, "collective_rpc", body=control.RpcBody),
    _row("POST", "/init_weight_transfer_engine", "vllm", "admin", weights.init_weight_transfer_engine,
         body=weights.InitBody),
    _row("POST", "/start_weight_update", "vllm", "admin", weights.start_weight_update, body=weights.StartBody),
    _row("POST", "/update_weights", "vllm", "admin", weights.update_weights, "update_weights", body=weights.UpdateBody),
    _row("POST", "/finish_weight_update", "vllm", "admin", weights.finish_weight_update, "update_weights",
         body=weights.FinishBody),
    _row("POST", "/fetch_weights", "vllm", "admin", weights.fetch_weights, "update_weights", body=weights.FetchBody),
    _row("GET", "/weight_info", "vllm", "client", weights.weight_info, "get_model_metadata"),
    _row("POST", "/weight_checker", "vllm", "admin", weights.weight_checker, "collective_rpc",
         body=weights.CheckerBody),
    _row("POST", "/v1/load_lora_adapter", "vllm", "admin", control.load_lora, "add_lora", body=control.LoadLoraBody),
    _row("POST", "/v1/unload_lora_adapter", "vllm", "admin", control.unload_lora, "remove_lora",
         body=control.UnloadLoraBody),
    _row("POST", "/load_lora_adapter", "vllm", "admin", control.load_lora, "add_lora", body=control.LoadLoraBody),
    _row("POST", "/unload_lora_adapter", "vllm", "admin", control.unload_lora, "remove_lora",
         body=control.UnloadLoraBody),
    _row("POST", "/init_broadcaster", "vllm", "admin", control.broadcaster),

    _row("POST PUT", "/generate", "sglang", "client", sglang_generate.generate, "generate",
         body=sglang_generate.GenerateBody, ignored=sglang_generate.IGNORED, neutral=sglang_generate.PEERS),
    _row("GET", "/model_info", "sglang", "client", sglang.model_info),
    _row("GET", "/get_model_info", "sglang", "client", sglang.model_info),
    _row("GET", "/get_server_info", "sglang", "client", server_info.server_info, body=server_info.InfoBody),
    _row("GET", "/get_weight_version", "sglang", "client", sglang.get_weight_version),
    _row("GET", "/get_load", "sglang", "client", sglang.get_load, "get_metrics"),
    _row("GET", "/v1/loads", "sglang", "client", sglang.loads, "get_metrics", body=sglang.LoadsBody),
    _row("GET", "/workers", "sglang", "client", sglang.workers),
    _row("GET", "/list_workers", "sglang", "client", sglang.workers),
    _row("POST", "/pause_generation", "sglang", "admin", sglang.pause_generation, "pause_generation",
         body=sglang.PauseBody),
    _row("POST", "/continue_generation", "sglang", "admin", sglang.continue_generation, "resume_generation",
         body=sglang.ContinueBody),
    _row("POST", "/flush_cache", "sglang", "admin", sglang.flush_cache, "reset_prefix_cache", body=sglang.FlushBody),
    _row("GET", "/flush_cache", "sglang", "client", sglang.is_idle, "get_metrics", body=sglang.FlushBody),
    _row("POST", "/release_memory_occupation", "sglang", "admin", sglang.release_memory_occupation, "sleep",
         body=sglang.MemoryBody),
    _row("POST", "/resume_memory_occupation", "sglang", "admin", sglang.resume_memory_occupation, "wake_up",
         body=sglang.MemoryBody),
    _row("POST", "/abort_request", "sglang", "admin", sglang.abort_request, "abort", body=sglang.AbortBody),
    _row("POST", "/init_weights_update_group", "sglang", "admin", sglang_weights.init_weights_update_group,
         body=sglang_weights.InitBody),
    _row("POST", "/destroy_weights_update_group", "sglang", "admin", sglang_weights.destroy_weights_update_group,
         body=sglang_weights.DestroyBody),
    _row("POST", "/begin_weight_update", "sglang", "admin", sglang_weights.begin_weight_update,
         body=sglang_weights.BeginBody),
    _row("POST", "/update_weights_from_distributed", "sglang", "admin",
         sglang_weights.update_weights_from_distributed, "update_weights", body=sglang_weights.DistributedBody),
    _row("POST", "/update_weights_from_tensor", "sglang", "admin", sglang_weights.update_weights_from_tensor,
         "update_weights", body=sglang_weights.TensorBody, is_large=True),
    _row("POST", "/update_weights_from_disk", "sglang", "admin", sglang_weights.update_weights_from_disk,
         "update_weights", body=sglang_weights.DiskBody),
    _row("POST", "/end_weight_update", "sglang", "admin", sglang_weights.end_weight_update, "update_weights",
         body=sglang_weights.BeginBody),
    _row("POST", "/update_weight_version", "sglang", "admin", sglang_weights.update_weight_version,
         body=sglang_weights.VersionBody),
    _row("POST", "/post_process_weights", "sglang", "admin", sglang_weights.post_process_weights,
         ignored=frozenset(("restore_weights_before_load", "post_process_quantization"))),
    _row("GET POST", "/get_weights_by_name", "sglang", "admin", sglang_weights.get_weights_by_name, "collective_rpc",
         body=sglang_weights.NameBody),
    _row("POST", "/weights_checker", "sglang", "admin", weights.weight_checker, "collective_rpc",
         body=weights.CheckerBody),
    _row("POST", "/load_lora_adapter_from_tensors", "sglang", "admin", adapters.load_lora_from_tensors, "add_lora",
         body=adapters.LoadTensorsBody, ignored=adapters.IGNORED, neutral=adapters.PEERS, is_large=True),
)
# fmt: on


def as_markdown() -> str:
    """The table as docs/server.md shows it."""
    lines = ["| route | dialect | who may call | verb | |", "|---|---|---|---|---|"]
    for row in ROUTES:
        verb = f"`{row.verb}`" if row.verb else ""
        lines.append(
            f"| {' '.join(row.methods)} `{row.path}` | {row.dialect} | {row.access.value} | {verb} | {row.help} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
