"""Pauses, memory, caches, loads, and clients' questions about the model."""

import time
from typing import Any, Literal

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.core.lifecycle import PauseMode
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from sync.manifest import first_names

_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""How a pause of SGLang's treats requests in flight -> ours. Retracted ones lose their KV when it is flushed."""
_TAGS = ("kv_cache", "weights")


async def model_info(served: Served, asked: Asked) -> Reply:
    """The model's path, and the version of its weights."""
    info = served.engine.frontend.client.info
    config = info.config
    return Reply(
        {
            "model_path": served.model_path,
            "tokenizer_path": config.tokenizer or config.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "has_image_understanding": bool(info.pictures and not info.pictures.unsupported_reason),
            "has_audio_understanding": False,
            "weight_version": served.version_text,
        }
    )


async def get_weight_version(served: Served, asked: Asked) -> Reply:
    """Version of the live weights, as text."""
    return Reply({"weight_version": served.version_text})


async def pause_generation(
    served: Served, asked: Asked, *, mode: Literal["abort", "retract", "in_place"] = "abort"
) -> Reply:
    """Stop generating: requests in flight end with what they have ("abort"), or wait. New ones wait too."""
    await served.engine.pause_generation(mode=_MODES[mode])
    served.is_paused = True
    return Reply({"message": "Generation paused successfully.", "status": "ok", "success": True})


async def continue_generation(served: Served, asked: Asked, *, torch_empty_cache: bool | None = None) -> Reply:
    """Go on after a pause. Refused while an update is incomplete: the old weights would go on serving unnoticed."""
    if served.updates.is_begun or served.updates.waits_for_end:
        missing = await served.updates.missing()
        what = f"{first_names(missing)} of the model's weights have not come" if missing else "an update was not ended"
        hint = "Send them, or give the update up by /destroy_weights_update_group; the old weights are live still."
        raise LifecycleError(f"continue_generation: {what}. {hint}")
    await served.engine.resume_generation()
    served.is_paused = False
    return Reply({"message": "Generation continued successfully.", "status": "ok", "success": True})


async def flush_cache(served: Served, asked: Asked, *, timeout: float | None = None) -> Reply:
    """Forget every known prefix. Not needed after an update: KV is keyed by the version that made it."""
    engine = served.engine
    if not await engine.reset_prefix_cache():
        if not await engine.is_paused():
            hint = "Pause or abort them first; after an update nothing needs to be flushed."
            raise HttpProblem(400, f"flush_cache: requests in flight hold KV blocks. {hint}")
        await engine.reset_prefix_cache(reset_running_requests=True)
    return Reply({"success": True, "message": "Cache flushed."})


async def is_idle(served: Served, asked: Asked, *, timeout: float | None = None) -> Reply:
    """200 once nothing is computed, as clients that flush by GET wait for it. It flushes nothing: POST does."""
    core = (await served.engine.get_metrics()).core
    num_open = core.num_running + core.num_waiting
    if num_open and not await served.engine.is_paused():
        hint = "Wait for them or pause them; after an update nothing needs to be flushed."
        raise HttpProblem(400, f"GET /flush_cache: {num_open} sequences are in flight. {hint}")
    message = "Nothing is computed. A GET flushes nothing: KV is keyed by the version that made it. POST flushes."
    return Reply({"success": True, "message": message})


def _memory_tags(given: list[str] | None) -> list[str]:
    """The tags that stand for memory here; CUDA graphs go with the KV. None: all. Raises `RequestError`."""
    tags = given or list(_TAGS)
    if not {*tags} <= {*_TAGS, "cuda_graph"}:
        raise RequestError.for_field("tags", tags, "of 'kv_cache', 'weights' and 'cuda_graph'")
    return [tag for tag in tags if tag != "cuda_graph"]


async def release_memory_occupation(served: Served, asked: Asked, *, tags: list[str] | None = None) -> Reply:
    """Give memory back: the KV pool, the weights, which an update must bring again, or both."""
    tags = _memory_tags(tags)
    if tags:
        before = served.released if await served.engine.is_sleeping() else frozenset()
        served.released = before.union(tags)
        await served.engine.sleep(2 if "weights" in served.released else 1, "keep")
        kept = [tag for tag in _TAGS if tag not in served.released]
        if kept:  # sleeping is all or nothing
            await served.engine.wake_up(kept)
    return Reply({"success": True, "message": f"released: {', '.join(tags)}"})


async def resume_memory_occupation(served: Served, asked: Asked, *, tags: list[str] | None = None) -> Reply:
    """Take memory back."""
    tags = _memory_tags(tags)
    if await served.engine.is_sleeping():
        await served.engine.wake_up(tags)
    served.released = served.released.difference(tags)
    return Reply({"success": True, "message": f"resumed: {', '.join(tags)}"})


async def abort_request(
    served: Served, asked: Asked, *, rid: str | None = None, abort_all: bool = False, abort_message: str | None = None
) -> Reply:
    """End a request, or each whose name begins so; or all. Each answers with the tokens it has."""
    if rid is None and not abort_all:
        raise RequestError.for_field("rid", None, "a request's name, or abort_all=true")
    ids = served.ids_of() if abort_all else served.ids_that_begin(rid or "")
    await served.engine.abort(ids)
    return Reply({"success": True, "num_aborted": len(ids)})


async def _load_of(served: Served) -> dict[str, Any]:
    info, core = served.engine.frontend.client.info, (await served.engine.get_metrics()).core
    num_tokens = info.num_blocks * info.block_size
    return {
        "dp_rank": 0,
        "num_reqs": core.num_running + core.num_waiting,
        "num_running_reqs": core.num_running,
        "num_waiting_reqs": core.num_waiting,
        "num_total_reqs": core.num_running + core.num_waiting,
        "num_tokens": round(core.cache_usage * num_tokens),
        "num_used_tokens": round(core.cache_usage * num_tokens),
        "max_total_num_tokens": num_tokens,
        "max_running_requests": info.config.max_num_seqs,
        "token_usage": core.cache_usage,
        "weight_version": served.version_text,
    }


async def get_load(served: Served, asked: Asked) -> Reply:
    """Sequences that run and wait, and how much of the KV pool they hold."""
    return Reply([await _load_of(served)])


async def loads(
    served: Served,
    asked: Asked,
    *,
    include: str | list[str] | None = None,
    dp_rank: int | None = None,
    format: str | None = None,
) -> Reply:
    """The same, with their sums."""
    load = await _load_of(served)
    sums = {f"total_{name}_reqs": load[f"num_{name}_reqs"] for name in ("running", "waiting")}
    sums["total_reqs"] = load["num_reqs"]
    return Reply({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load], "aggregate": sums})


async def workers(served: Served, asked: Asked) -> Reply:
    """This server, as a router lists it: clients of routers may be given this server's address in its place."""
    url = f"http://{asked.headers.get('host', '')}"
    return Reply({"workers": [{"id": "0", "url": url, "worker_type": "regular", "is_healthy": True}], "urls": [url]})
