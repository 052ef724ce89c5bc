"""Handlers of Tinker's protocol that neither sample nor train: sessions, samplers, futures, capabilities."""

import os
from typing import Any, Literal

from rollout_engine.base.errors import RequestError
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.tinker.clients import Sampler

ABOUT_CLIENTS = frozenset(("tags", "user_metadata", "sdk_version", "project_id", "display_name"))
"""Fields that describe a client, and change nothing."""
_UNEMBED = (
    "This server trains no adapter of the unembedding, which its engine does not serve: train_unembed=True is read as "
    "False. Pass train_unembed=False to create_lora_training_client."
)


async def health(served: Served, asked: Asked) -> Reply:
    """Whether the server is there."""
    served.tinker.require_on()
    return Reply({"status": "ok"})


async def capabilities(served: Served, asked: Asked) -> Reply:
    """The model, and whether adapters of it can be trained."""
    tinker = served.tinker.require_on()
    model = {
        "model_name": served.model,
        "max_context_length": served.max_model_len,
        "trainable": tinker.can_train,
        "sampleable": True,
    }
    return Reply({"supported_models": [model]})


async def client_config(served: Served, asked: Asked) -> Reply:
    """How the SDK is to behave: no exchange of keys, passes one after another, polls by request."""
    served.tinker.require_on()
    return Reply(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": False,
            "custom_loss_server_side": False,
        }
    )


async def dynamic_config(served: Served, asked: Asked) -> Reply:
    """Flags that the SDK reads every few minutes: it is to cancel samples that it has abandoned."""
    served.tinker.require_on()
    return Reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


async def telemetry(served: Served, asked: Asked) -> Reply:
    """Take events of the SDK, and keep none."""
    served.tinker.require_on()
    return Reply({"status": "accepted"})


async def create_session(served: Served, asked: Asked, *, type: Literal["create_session"] = "create_session") -> Reply:
    """Open a session."""
    tinker = served.tinker.require_on()
    body = {"session_id": tinker.clients.add().id, "type": type}
    return Reply(body | {"warning_message": _UNEMBED} if tinker.can_train else body)


async def heartbeat(
    served: Served, asked: Asked, *, session_id: str, type: Literal["session_heartbeat"] = "session_heartbeat"
) -> Reply:
    """Keep a session open."""
    served.tinker.require_on().clients.get(session_id)
    return Reply({"type": type})


async def finish_session(
    served: Served, asked: Asked, *, reason: dict[str, Any] | None = None, detail: str | None = None
) -> Reply:
    """End a session."""
    tinker = served.tinker.require_on()
    tinker.end(tinker.clients.get(asked.path_id).id)
    return Reply({})


async def create_sampler(
    served: Served,
    asked: Asked,
    *,
    session_id: str,
    sampling_session_seq_id: int,
    base_model: str | None = None,
    model_path: str | None = None,
    type: Literal["create_sampling_session"] = "create_sampling_session",
) -> Reply:
    """Make a sampler of the model, or of a checkpoint."""
    tinker = served.tinker.require_on()
    client = tinker.clients.get(session_id)
    served.check_model(base_model)
    sampler = Sampler(f"{client.id}:sample:{sampling_session_seq_id}", client.id)
    if model_path is not None:
        sampler.checkpoint = await run_in_thread(tinker.checkpoints.find, model_path)
        served.check_model(sampler.checkpoint.about.base_model)
    elif base_model is not None:
        sampler.is_base = True
    else:
        raise RequestError.for_field("base_model", None, f"'{served.model}', or a model_path")
    tinker.clients.add_sampler(client, sampler)
    return Reply({"type": type, "sampling_session_id": sampler.id})


async def get_sampler(served: Served, asked: Asked) -> Reply:
    """The model and the checkpoint of a sampler."""
    sampler = served.tinker.require_on().clients.find_sampler(asked.path_id)
    checkpoint = sampler.checkpoint
    body = {"sampler_id": sampler.id, "base_model": served.model}
    return Reply(body | {"model_path": None if checkpoint is None else checkpoint.path})


async def retrieve_future(served: Served, asked: Asked, *, request_id: str, allow_metadata_only: bool = False) -> Reply:
    """Wait for the result of a queued request; after a while, answer that it is to be asked for again."""
    futures = served.tinker.require_on().futures
    pending = futures.get(request_id)
    if pending.outcome.done() or await pending.wait():
        return futures.retrieve(pending)
    return Reply({"type": "try_again", "request_id": request_id, "queue_state": "active"})


async def cancel_future(served: Served, asked: Asked, *, request_id: str) -> Reply:
    """Stop a sample that is not wanted any more."""
    futures = served.tinker.require_on().futures
    pending = futures.find(request_id)
    if pending is not None:
        futures.drop(pending)
    return Reply({})


def model_names(served: Served) -> dict[str, Any]:
    """The model as the SDK reads it: its tokenizer is a directory of this machine, or an id of the hub."""
    config = served.engine.frontend.client.info.config
    tokenizer = str(config.tokenizer or config.model)
    path = os.path.abspath(os.path.expanduser(tokenizer))
    return {"model_name": served.model, "tokenizer_id": path if os.path.isdir(path) else tokenizer}
