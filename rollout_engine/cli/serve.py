"""Serves a model over HTTP, in the dialects of OpenAI, Anthropic, vLLM, SGLang and Tinker.

    rollout-engine serve Qwen/Qwen3-0.6B
    rollout-engine serve path/of/checkpoint --port 8000 --replicas 2 dtype=bfloat16 max_model_len=4096
    rollout-engine serve path/of/checkpoint --chat-template template.jinja
    rollout-engine serve path/of/checkpoint --allow-media images.example.org --allow-media-dir /data/images
    rollout-engine serve path/of/checkpoint --tinker runs/tinker
    rollout-engine serve path/of/checkpoint --host 0.0.0.0 --api-key KEY --admin-key OTHER_KEY

It listens on this machine alone unless --host says otherwise, which needs both keys. SIGTERM and Ctrl-C let open
requests end first. docs/server.md lists the routes.
"""

import argparse
import os
from typing import Any

from rollout_engine.base.errors import ConfigError
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.terminal import announce, number_of
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.rollouts.tinker import lora_trainer
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer, check_server

_KEYS = {"api_key": "ROLLOUT_ENGINE_API_KEY", "admin_key": "ROLLOUT_ENGINE_ADMIN_KEY"}
_LIMITS: dict[str, type[int] | type[float]] = {
    "max_body_bytes": int,
    "max_weight_bytes": int,
    "max_open_body_bytes": int,
    "max_picture_bytes": int,
    "max_open_picture_bytes": int,
    "picture_seconds": float,
    "body_seconds": float,
    "max_connections": int,
    "drain_seconds": float,
    "max_sessions": int,
    "session_seconds": float,
    "session_tokens": int,
    "session_bytes": int,
    "all_sessions_bytes": int,
    "session_turns": int,
    "session_retry_seconds": float,
    "tinker_clients": int,
    "tinker_waiting": int,
    "tinker_idle_seconds": float,
}
"""Options that bound the resources of clients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `serve`."""
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (8000)")
    parser.add_argument("--replicas", type=int, default=1, help="engines behind the one address (1)")
    parser.add_argument("--api-key", help=f"key of clients that generate; also from ${_KEYS['api_key']}")
    parser.add_argument("--admin-key", help=f"key for control and weights; also from ${_KEYS['admin_key']}")
    parser.add_argument("--served-model-name", help="name that clients give (the model's path or id)")
    parser.add_argument("--chat-template", help="a Jinja template, or a file with one, in place of the tokenizer's")
    parser.add_argument("--return-tokens-as-token-ids", action="store_true", help='log-probs name tokens "token_id:7"')
    parser.add_argument("--logprobs-mode", default="tempered", help="tempered, processed or raw (tempered)")
    parser.add_argument(
        "--trust-request-chat-template", action="store_true", help="requests may bring a chat_template, a program"
    )
    parser.add_argument("--sessions", action="store_true", help="keep sessions of agents as training rows")
    parser.add_argument("--tinker", metavar="DIR", help="sample and train for Tinker's clients; DIR has checkpoints")
    parser.add_argument("--allowed-origins", nargs="*", default=[], help="web pages whose scripts may call")
    for name, value in {"allow_media": "HOST", "allow_media_dir": "DIR"}.items():
        described = f"as ServeOptions.{name}; may be given many times (none)"
        parser.add_argument(_option(name), action="append", default=[], metavar=value, help=described)
    for name, kind in _LIMITS.items():
        default = getattr(ServeOptions(), name)
        parser.add_argument(_option(name), type=kind, default=default, help=f"as ServeOptions.{name} ({default})")
    add_overrides(parser)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(arguments: argparse.Namespace) -> None:
    """Start the engine, print the address, and serve until a signal to stop."""
    overrides = parse_overrides(arguments.overrides)
    if overrides.sampling:
        names = ", ".join(overrides.sampling)
        raise ConfigError(f"{names}: sampling params come with each request; a server takes fields of EngineConfig.")
    template = arguments.chat_template
    if template is not None and overrides.engine.setdefault("chat_template", template) != template:
        raise ConfigError("--chat-template and chat_template= are both set: give one of them.")
    keys: dict[str, Any] = {name: getattr(arguments, name) or os.environ.get(_KEYS[name]) for name in _KEYS}
    options = ServeOptions(
        host=arguments.host,
        port=arguments.port,
        served_model_name=arguments.served_model_name,
        trust_request_chat_template=arguments.trust_request_chat_template,
        sessions=arguments.sessions,
        tinker=arguments.tinker,
        allowed_origins=arguments.allowed_origins,
        allow_media=arguments.allow_media,
        allow_media_dir=arguments.allow_media_dir,
        logprobs_mode=arguments.logprobs_mode,
        return_tokens_as_token_ids=arguments.return_tokens_as_token_ids,
        **{name: getattr(arguments, name) for name in _LIMITS},
        **keys,
    )
    check_server(options)
    with announce(f"starting {number_of(arguments.replicas, 'replica')} of {arguments.model}"):
        engine = AsyncLLM(arguments.model, num_replicas=arguments.replicas, **overrides.engine)
    try:
        server = HttpServer(engine, options, None if options.tinker is None else lora_trainer(engine))
        print(f"{server.url} serves {server.app.served.model}", flush=True)
        server.run()
    finally:
        engine.shutdown()
