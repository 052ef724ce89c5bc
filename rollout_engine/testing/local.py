"""A policy and an HTTP server for tests, which start in tenths of a second and take little memory."""

import os
from typing import Any

from rollout_engine.faces.verb_methods import Face
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer

_DEFAULTS: dict[str, Any] = {"seed": 0, "kv_cache_bytes": 64 << 20, "log_stats": False}


def local_policy(checkpoint: str | os.PathLike[str], **options: Any) -> RolloutPolicy:
    """A policy of this process with 64 MiB of KV and seed 0; `options`: fields of `EngineConfig`."""
    return RolloutPolicy.from_pretrained(os.fspath(checkpoint), **(_DEFAULTS | options))


def local_server(engine: Face, **options: Any) -> HttpServer:
    """Listen for `engine` on a free port; `options`: fields of `ServeOptions`. A context manager, or call `start`."""
    return HttpServer(engine, ServeOptions(port=0, **options))
