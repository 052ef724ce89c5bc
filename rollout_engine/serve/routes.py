"""The one table of routes: dialect, method, who may call, and which verb of the engine answers.

The application, the test of who may call what, and docs/server.md come from it.
"""

from typing import Any

from rollout_engine.serve import health
from rollout_engine.serve.openai import chat, completions, models
from rollout_engine.serve.route import Access, Dialect, Handler, Route
from rollout_engine.serve.sampling import CHAT_PEERS, IGNORED, SAMPLING_PEERS

_WHO = {"anyone": Access.ANYONE, "client": Access.CLIENT, "admin": Access.ADMIN}
_GENERATION: dict[str, Any] = {"ignored": IGNORED, "neutral": SAMPLING_PEERS}
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
    _row("GET", "/health_generate", "sglang", "client", health.health_generate, "check_health"),

    _row("GET", "/v1/models", "openai", "client", models.list_models),
    _row("POST", "/v1/completions", "openai", "client", completions.create, "generate",
         body=completions.CompletionBody, **_GENERATION),
    _row("POST", "/v1/chat/completions", "openai", "client", chat.create, "generate", body=chat.ChatBody, **_CHAT),
    _row("POST", "/tokenize", "vllm", "client", models.tokenize, body=models.TokenizeBody),
    _row("POST", "/detokenize", "vllm", "client", models.detokenize, body=models.DetokenizeBody),
    _row("GET", "/tokenizer_info", "vllm", "client", models.tokenizer_info),
)
# fmt: on
