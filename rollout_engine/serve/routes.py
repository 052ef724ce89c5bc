"""The one table of routes: dialect, method, who may call, and which verb of the engine answers.

The application, the test of access rights, and docs/server.md are made from it. A new route is an async function and a
row. The function takes the engine and the request, and its keyword parameters are the fields of the body, checked by
their annotations; other fields are refused. Its docstring is the row's line in docs/server.md.
"""

from typing import Any

from rollout_engine.serve import about, adapters, telemetry, weights
from rollout_engine.serve.anthropic import body as anthropic
from rollout_engine.serve.anthropic import messages
from rollout_engine.serve.openai import chat, completions, models, response_body, responses
from rollout_engine.serve.pooling import embeddings, scores
from rollout_engine.serve.pooling.call import IGNORED as POOLING_IGNORED
from rollout_engine.serve.pooling.call import PEERS as POOLING_PEERS
from rollout_engine.serve.route import Route
from rollout_engine.serve.route import route_rows as _rows
from rollout_engine.serve.sampling import CHAT_PEERS, IGNORED, SAMPLING_PEERS
from rollout_engine.serve.sessions import handlers as sessions
from rollout_engine.serve.sglang import control as sglang
from rollout_engine.serve.sglang import generate as sglang_generate
from rollout_engine.serve.tinker.rows import TINKER_ROUTES
from rollout_engine.serve.vllm import control, inference, sequence_logprobs

_GENERATION: dict[str, Any] = {"ignored": IGNORED, "neutral": SAMPLING_PEERS}
_POOLING: dict[str, Any] = {"ignored": POOLING_IGNORED, "neutral": POOLING_PEERS}
_CHAT: dict[str, Any] = {"ignored": IGNORED, "neutral": {**SAMPLING_PEERS, **CHAT_PEERS}}

# fmt: off
ROUTES: tuple[Route, ...] = (
    *_rows("GET", "/health", "openai", "anyone", about.health),
    *_rows("GET POST", "/ping", "vllm", "anyone", about.health),
    *_rows("GET", "/liveness /readiness", "vllm", "anyone", about.health),
    *_rows("GET", "/health_generate", "sglang", "client", about.health_generate, "check_health"),

    *_rows("GET", "/version", "vllm", "client", about.get_version),
    *_rows("GET", "/openapi.json", "vllm", "client", about.openapi),
    *_rows("GET", "/metrics", "openai", "client", telemetry.metrics, "get_metrics"),
    *_rows("POST", "/start_profile", "sglang", "admin", telemetry.start_profile, "start_profile"),
    *_rows("POST", "/stop_profile", "sglang", "admin", telemetry.stop_profile, "stop_profile"),

    *_rows("GET", "/v1/models", "openai", "client", models.list_models),
    *_rows("POST", "/v1/completions", "openai", "client", completions.create, "generate",
           body=completions.CompletionBody, **_GENERATION),
    *_rows("POST", "/v1/chat/completions", "openai", "client", chat.create, "generate", body=chat.ChatBody, **_CHAT),
    *_rows("POST", "/v1/responses", "openai", "client", responses.create, "generate", body=response_body.ResponsesBody,
           ignored=response_body.IGNORED, neutral=response_body.PEERS),
    *_rows("POST", "/v1/messages", "anthropic", "client", messages.create, "generate", body=anthropic.MessagesBody,
           ignored=anthropic.IGNORED, neutral=anthropic.PEERS),
    *_rows("POST", "/v1/messages/count_tokens", "anthropic", "client", messages.count_tokens,
           body=anthropic.PromptFields, ignored=anthropic.IGNORED, neutral=anthropic.PEERS),
    *_rows("POST", "/sessions", "openai", "client", sessions.create_session),
    *_rows("GET", "/sessions/{id}", "openai", "client", sessions.get_session),
    *_rows("DELETE", "/sessions/{id}", "openai", "client", sessions.delete_session),
    *_rows("GET", "/sessions/{id}/rows", "openai", "client", sessions.get_rows),
    *_rows("POST", "/sessions/{id}/reward", "openai", "client", sessions.set_reward),
    *_rows("POST", "/inference/v1/generate", "vllm", "client", inference.generate, "generate",
           body=inference.InferenceBody, ignored=inference.IGNORED, neutral=inference.PEERS),
    *_rows("POST", "/get_sequence_logprobs", "vllm", "client", sequence_logprobs.score_sequences, "score_candidates",
           body=sequence_logprobs.SequenceLogprobsBody),
    *_rows("POST", "/v1/embeddings", "openai", "client", embeddings.embeddings, "encode",
           body=embeddings.EmbeddingBody, **_POOLING),
    *_rows("POST", "/pooling", "vllm", "client", embeddings.pooling, "encode", body=embeddings.PoolingBody, **_POOLING),
    *_rows("POST", "/classify", "vllm", "client", embeddings.classify, "encode", body=embeddings.ClassifyBody,
           **_POOLING),
    *_rows("POST", "/score /v1/score", "vllm", "client", scores.score, "encode", body=scores.ScoreBody, **_POOLING),
    *_rows("POST", "/rerank /v1/rerank /v2/rerank", "vllm", "client", scores.rerank, "encode",
           body=scores.RerankBody, **_POOLING),
    *_rows("POST", "/tokenize", "vllm", "client", models.tokenize, body=models.TokenizeBody),
    *_rows("POST", "/detokenize", "vllm", "client", models.detokenize),
    *_rows("GET", "/tokenizer_info", "vllm", "client", models.tokenizer_info),

    *_rows("GET POST", "/server_info", "vllm", "client", about.server_info),
    *_rows("GET", "/load", "vllm", "client", control.load),
    *_rows("GET", "/get_world_size", "vllm", "client", control.get_world_size),
    *_rows("POST", "/pause", "vllm", "admin", control.pause, "pause_generation"),
    *_rows("POST", "/resume", "vllm", "admin", control.resume, "resume_generation"),
    *_rows("GET", "/is_paused", "vllm", "client", control.is_paused, "is_paused"),
    *_rows("POST", "/sleep", "vllm", "admin", control.sleep, "sleep"),
    *_rows("POST", "/wake_up /wakeup", "vllm", "admin", control.wake_up, "wake_up"),
    *_rows("GET", "/is_sleeping", "vllm", "client", control.is_sleeping, "is_sleeping"),
    *_rows("POST", "/reset_prefix_cache", "vllm", "admin", control.reset_prefix_cache, "reset_prefix_cache"),
    *_rows("POST", "/reset_mm_cache", "vllm", "admin", control.reset_mm_cache, "reset_mm_cache"),
    *_rows("POST", "/reset_encoder_cache", "vllm", "admin", control.reset_encoder_cache, "reset_encoder_cache"),
    *_rows("POST", "/abort_requests", "vllm", "admin", control.abort_requests, "abort"),
    *_rows("POST", "/collective_rpc", "vllm", "admin", control.collective_rpc, "collective_rpc"),
    *_rows("POST", "/init_weight_transfer_engine", "vllm", "admin", weights.init_weight_transfer_engine),
    *_rows("POST", "/start_weight_update", "vllm", "admin", weights.start_weight_update),
    *_rows("POST", "/update_weights", "vllm", "admin", weights.update_weights, "update_weights"),
    *_rows("POST", "/finish_weight_update", "vllm", "admin", weights.finish_weight_update, "update_weights"),
    *_rows("POST", "/fetch_weights", "vllm", "admin", weights.fetch_weights, "update_weights"),
    *_rows("GET", "/weight_info", "vllm", "client", weights.weight_info, "get_model_metadata"),
    *_rows("POST", "/weight_checker", "vllm", "admin", weights.weight_checker, "collective_rpc"),
    *_rows("POST", "/v1/load_lora_adapter", "vllm", "admin", adapters.load_lora, "add_lora"),
    *_rows("POST", "/v1/unload_lora_adapter", "vllm", "admin", adapters.unload_lora, "remove_lora"),
    *_rows("POST", "/load_lora_adapter", "vllm", "admin", adapters.load_lora, "add_lora"),
    *_rows("POST", "/unload_lora_adapter", "vllm", "admin", adapters.unload_lora, "remove_lora"),
    *_rows("POST", "/init_broadcaster", "vllm", "admin", control.broadcaster),

    *_rows("POST PUT", "/generate", "sglang", "client", sglang_generate.generate, "generate",
           body=sglang_generate.GenerateBody, ignored=sglang_generate.IGNORED, neutral=sglang_generate.PEERS),
    *_rows("GET", "/model_info /get_model_info", "sglang", "client", sglang.model_info),
    *_rows("GET", "/get_server_info", "sglang", "client", about.server_info),
    *_rows("GET", "/get_weight_version", "sglang", "client", sglang.get_weight_version),
    *_rows("GET", "/get_load", "sglang", "client", sglang.get_load, "get_metrics"),
    *_rows("GET", "/v1/loads", "sglang", "client", sglang.loads, "get_metrics"),
    *_rows("GET", "/workers /list_workers", "sglang", "client", sglang.workers),
    *_rows("POST", "/pause_generation", "sglang", "admin", sglang.pause_generation, "pause_generation"),
    *_rows("POST", "/continue_generation", "sglang", "admin", sglang.continue_generation, "resume_generation"),
    *_rows("POST", "/flush_cache", "sglang", "admin", sglang.flush_cache, "reset_prefix_cache"),
    *_rows("GET", "/flush_cache", "sglang", "client", sglang.is_idle, "get_metrics"),
    *_rows("POST", "/release_memory_occupation", "sglang", "admin", sglang.release_memory_occupation, "sleep"),
    *_rows("POST", "/resume_memory_occupation", "sglang", "admin", sglang.resume_memory_occupation, "wake_up"),
    *_rows("POST", "/abort_request", "sglang", "admin", sglang.abort_request, "abort"),
    *_rows("POST", "/init_weights_update_group", "sglang", "admin", weights.init_weights_update_group,
           body=weights.InitBody),
    *_rows("POST", "/destroy_weights_update_group", "sglang", "admin", weights.destroy_weights_update_group),
    *_rows("POST", "/begin_weight_update", "sglang", "admin", weights.begin_weight_update),
    *_rows("POST", "/update_weights_from_distributed", "sglang", "admin",
           weights.update_weights_from_distributed, "update_weights", body=weights.DistributedBody),
    *_rows("POST", "/update_weights_from_tensor", "sglang", "admin", weights.update_weights_from_tensor,
           "update_weights", body=weights.TensorBody, is_large=True),
    *_rows("POST", "/update_weights_from_disk", "sglang", "admin", weights.update_weights_from_disk,
           "update_weights", body=weights.DiskBody),
    *_rows("POST", "/end_weight_update", "sglang", "admin", weights.end_weight_update, "update_weights"),
    *_rows("POST", "/update_weight_version", "sglang", "admin", weights.update_weight_version),
    *_rows("POST", "/post_process_weights", "sglang", "admin", weights.post_process_weights,
           ignored=frozenset(("restore_weights_before_load", "post_process_quantization"))),
    *_rows("GET POST", "/get_weights_by_name", "sglang", "admin", weights.get_weights_by_name, "collective_rpc"),
    *_rows("POST", "/weights_checker", "sglang", "admin", weights.weight_checker, "collective_rpc"),
    *_rows("POST", "/load_lora_adapter_from_tensors", "sglang", "admin", adapters.load_lora_from_tensors, "add_lora",
           ignored=adapters.IGNORED, neutral=adapters.PEERS, is_large=True),

    *TINKER_ROUTES,
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
