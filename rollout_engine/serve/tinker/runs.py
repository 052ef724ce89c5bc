"""Handlers of checkpoints: of which adapter one is, those of an adapter, and their end."""

import time
from typing import Any

from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.tinker.checkpoints import Checkpoint


async def weights_info(served: Served, asked: Asked, *, tinker_path: str) -> Reply:
    """The model and the shape of a checkpoint's adapter."""
    tinker = served.tinker.require_on()
    about = (await run_in_thread(tinker.checkpoints.find, tinker_path)).about
    shape = {"train_unembed": False, "train_mlp": about.shape.train_mlp, "train_attn": about.shape.train_attn}
    return Reply({"base_model": about.base_model, "is_lora": True, "lora_rank": about.shape.rank, **shape})


async def get_run(served: Served, asked: Asked) -> Reply:
    """An adapter that has checkpoints, and the last ones."""
    checkpoints = await _checkpoints_of(served, asked.path_id)
    last: dict[str, Any] = {each.kind: _describe_checkpoint(each) for each in checkpoints}
    about = checkpoints[-1].about
    return Reply(
        {
            "training_run_id": asked.path_id,
            "base_model": about.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": about.shape.rank,
            "last_request_time": _format_time(about.saved_at),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": about.model_metadata,
        }
    )


async def list_checkpoints(served: Served, asked: Asked) -> Reply:
    """The checkpoints of an adapter, oldest first."""
    return Reply({"checkpoints": [_describe_checkpoint(each) for each in await _checkpoints_of(served, asked.path_id)]})


async def delete_checkpoint(served: Served, asked: Asked) -> Reply:
    """Delete a checkpoint."""
    await run_in_thread(served.tinker.require_on().checkpoints.delete, f"tinker://{asked.path_id}")
    return Reply({})


async def _checkpoints_of(served: Served, model_id: str) -> list[Checkpoint]:
    found = await run_in_thread(served.tinker.require_on().checkpoints.list, model_id)
    if not found:
        raise HttpProblem(404, f"There are no checkpoints of a model '{model_id:.200}'.", field="model_id")
    return found


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    about = checkpoint.about
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": _format_time(about.saved_at),
        "tinker_path": checkpoint.path,
        "user_metadata": about.user_metadata,
        "expires_at": None if about.expires_at is None else _format_time(about.expires_at),
    }


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
