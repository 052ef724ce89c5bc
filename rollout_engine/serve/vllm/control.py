"""Pauses, sleep and calls by name."""

from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.core.lifecycle import SCHEDULING, TAGS, PauseMode
from rollout_engine.serve.options import Seconds
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


async def pause(
    served: Served,
    asked: Asked,
    *,
    mode: PauseMode = "abort",
    clear_cache: bool | None = None,
    wait_for_inflight_requests: bool | None = None,
    drain_timeout: Seconds | None = None,
) -> Reply:
    """Stop generating: requests in flight end with what they have ("abort"), finish ("wait"), or wait ("keep").

    New ones wait.
    """
    mode = "wait" if wait_for_inflight_requests else mode
    await served.engine.pause_generation(mode=mode, clear_cache=bool(clear_cache), drain_timeout=drain_timeout)
    served.is_paused = True
    return Reply({"status": "paused", "success": True, "weight_version": served.weight_version})


async def resume(served: Served, asked: Asked) -> Reply:
    """Go on after a pause."""
    await served.engine.resume_generation()
    served.is_paused = False
    return Reply({"status": "resumed", "success": True, "weight_version": served.weight_version})


async def is_paused(served: Served, asked: Asked) -> Reply:
    """Whether a pause is in force."""
    return Reply({"is_paused": await served.engine.is_paused()})


async def sleep(
    served: Served,
    asked: Asked,
    *,
    level: int = 1,
    mode: PauseMode = "abort",
    drain_timeout: Seconds | None = None,
    tags: list[str] | str | None = None,
) -> Reply:
    """Give memory back: the KV pool (level 1), and the weights as well (level 2); level 0 stops scheduling alone."""
    if level not in (0, 1, 2):
        raise RequestError.for_field("level", level, "0 (nothing), 1 (the KV pool) or 2 (the weights as well)")
    if tags:
        hint = "POST /release_memory_occupation takes tags."
        raise RequestError.for_field("tags", tags, "left out: the level says which memory is given back", hint)
    await served.engine.sleep(level, mode, drain_timeout=drain_timeout)
    served.is_paused = True
    return Reply({"status": "asleep", "success": True})


async def wake_up(served: Served, asked: Asked, *, tags: list[str] | str | None = None) -> Reply:
    """Take memory back: "weights", "kv_cache", or all. "scheduling" ends a sleep at level 0."""
    given = [tags] if isinstance(tags, str) else tags
    if given and not set(given) <= {*TAGS, SCHEDULING}:
        known = ", ".join(map(repr, (*TAGS, SCHEDULING)))
        raise RequestError.for_field("tags", tags, f"of {known}, or left out for all")
    await served.engine.wake_up(given or None)
    is_asleep = await served.engine.is_sleeping()
    if not is_asleep and not await served.engine.is_paused():
        served.is_paused = False
    return Reply({"status": "asleep" if is_asleep else "awake", "success": True})


async def is_sleeping(served: Served, asked: Asked) -> Reply:
    """Whether some memory is still given back."""
    return Reply({"is_sleeping": await served.engine.is_sleeping()})


async def reset_prefix_cache(
    served: Served,
    asked: Asked,
    *,
    reset_running_requests: bool = False,
    reset_external: bool | None = None,
    reset_connector: bool | None = None,
) -> Reply:
    """Forget every known prefix. Not needed after an update: KV is keyed by the version that made it."""
    with_connector = bool(reset_external or reset_connector)
    done = await served.engine.reset_prefix_cache(reset_running_requests, with_connector)
    return Reply({"success": done, "message": "" if done else "requests in flight hold KV blocks"})


async def reset_mm_cache(served: Served, asked: Asked) -> Reply:
    """Forget the pictures that engines in other processes keep, so that requests need not send them again."""
    await served.engine.reset_mm_cache()
    return Reply({"success": True})


async def reset_encoder_cache(served: Served, asked: Asked) -> Reply:
    """Forget the vision tower's outputs of known pictures. Not needed after an update."""
    await served.engine.reset_encoder_cache()
    return Reply({"success": True})


async def abort_requests(served: Served, asked: Asked, *, request_ids: list[str] | None = None) -> Reply:
    """End requests, by the ids that clients gave them; all without ids. Each answers with the tokens it has."""
    ids = served.ids_of(request_ids)
    await served.engine.abort(ids)
    return Reply({"success": True, "num_aborted": len(ids)})


async def collective_rpc(
    served: Served,
    asked: Asked,
    *,
    method: str,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Reply:
    """Call a method of a worker extension on every rank."""
    results = await served.engine.collective_rpc(method, timeout, args, kwargs)
    return Reply({"results": results, "weight_version": served.weight_version})


async def load(served: Served, asked: Asked) -> Reply:
    """How many requests of clients are open."""
    return Reply({"server_load": served.num_open})


async def get_world_size(served: Served, asked: Asked) -> Reply:
    """Ranks that receive weights: this server is one, however many replicas stand behind it."""
    return Reply({"world_size": 1})


async def broadcaster(served: Served, asked: Asked) -> Reply:
    """Prime-rl's own NCCL group is not served."""
    raise HttpProblem(501, "/init_broadcaster is not served: send weights by /update_weights {weight_dir}.")
