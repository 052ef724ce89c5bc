"""Pauses, sleep and calls by name."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.core.lifecycle import TAGS, PauseMode
from rollout_engine.serve.adapter_problems import by_route_names
from rollout_engine.serve.options import Seconds
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served

_SCHEDULING = "scheduling"
"""Woken by name in vLLM; here requests are scheduled once all memory is back."""


class PauseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    mode: PauseMode = "abort"
    """ "abort", "wait" or "keep", as `pause_generation` says."""
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None
    drain_timeout: Seconds | None = None


async def pause(served: Served, asked: Asked) -> Reply:
    """Stop generating: requests in flight end with what they have ("abort"), finish ("wait"), or wait ("keep").

    New ones wait.
    """
    body: PauseBody = asked.body
    mode: PauseMode = "wait" if body.wait_for_inflight_requests else body.mode
    await served.engine.pause_generation(
        mode=mode, clear_cache=bool(body.clear_cache), drain_timeout=body.drain_timeout
    )
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


class SleepBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    level: int = 1
    mode: PauseMode = "abort"
    drain_timeout: Seconds | None = None
    tags: list[str] | str | None = None
    """Given alone to /wake_up."""


async def sleep(served: Served, asked: Asked) -> Reply:
    """Give memory back: the KV pool (level 1), and the weights as well (level 2)."""
    body: SleepBody = asked.body
    if body.level not in (1, 2):
        raise RequestError.for_field("level", body.level, "1 (the KV pool) or 2 (the weights as well)")
    if body.tags:
        hint = "POST /release_memory_occupation takes tags."
        raise RequestError.for_field("tags", body.tags, "left out: the level says which memory is given back", hint)
    await served.engine.sleep(body.level, body.mode, drain_timeout=body.drain_timeout)
    served.is_paused = True
    return Reply({"status": "asleep", "success": True})


class WakeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    tags: list[str] | str | None = None


async def wake_up(served: Served, asked: Asked) -> Reply:
    """Take memory back: "weights", "kv_cache", or all."""
    body: WakeBody = asked.body
    given = [body.tags] if isinstance(body.tags, str) else body.tags
    if given and not set(given) <= {*TAGS, _SCHEDULING}:
        raise RequestError.for_field("tags", body.tags, f"of {' and '.join(map(repr, TAGS))}, or left out for all")
    await served.engine.wake_up([tag for tag in given if tag != _SCHEDULING] if given else None)
    is_asleep = await served.engine.is_sleeping()
    if not is_asleep and not await served.engine.is_paused():
        served.is_paused = False
    return Reply({"status": "asleep" if is_asleep else "awake", "success": True})


async def is_sleeping(served: Served, asked: Asked) -> Reply:
    """Whether some memory is still given back."""
    return Reply({"is_sleeping": await served.engine.is_sleeping()})


class ResetBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    reset_running_requests: bool = False
    reset_external: bool | None = None


async def reset_prefix_cache(served: Served, asked: Asked) -> Reply:
    """Forget every known prefix. Not needed after an update: KV is keyed by the version that made it."""
    body: ResetBody = asked.body
    done = await served.engine.reset_prefix_cache(body.reset_running_requests)
    return Reply({"success": done, "message": "" if done else "requests in flight hold KV blocks"})


class AbortBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    request_ids: list[str] | None = None


async def abort_requests(served: Served, asked: Asked) -> Reply:
    """End requests, by the ids that clients gave them; all without ids. Each answers with the tokens it has."""
    ids = served.ids_of(asked.body.request_ids)
    await served.engine.abort(ids)
    return Reply({"success": True, "num_aborted": len(ids)})


class RpcBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def collective_rpc(served: Served, asked: Asked) -> Reply:
    """Call a method of a worker extension on every rank."""
    body: RpcBody = asked.body
    results = await served.engine.collective_rpc(body.method, body.timeout, tuple(body.args), body.kwargs)
    return Reply({"results": results, "weight_version": served.weight_version})


async def load(served: Served, asked: Asked) -> Reply:
    """How many requests of clients are open."""
    return Reply({"server_load": served.num_open})


async def get_world_size(served: Served, asked: Asked) -> Reply:
    """Ranks that receive weights: this server is one, however many replicas stand behind it."""
    return Reply({"world_size": 1})


class LoadLoraBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Other values under a known name: without a revision, the next one."""
    revision: int | None = None
    base_model_name: str | None = None


async def load_lora(served: Served, asked: Asked) -> Reply:
    """Add an adapter from a directory of this machine, in PEFT's format."""
    body: LoadLoraBody = asked.body
    served.check_model(body.base_model_name)
    revision = await revision_of(served, body.lora_name, body.revision, load_inplace=body.load_inplace)
    with by_route_names({"name": "lora_name", "path": "lora_path"}):
        info = await served.engine.add_lora(LoRARequest(body.lora_name, body.lora_path, revision=revision))
    return Reply({"success": True, "message": f"LoRA adapter '{info.name}' is served.", "adapter": info})


async def revision_of(served: Served, name: str, revision: int | None, *, load_inplace: bool) -> int:
    """The revision of values that come; with `load_inplace` and without one, the next. Raises `RequestError`."""
    if name in (served.model, "default"):
        raise RequestError.for_field("lora_name", name, "another name than the model's")
    if revision is not None:
        return revision
    known = [each.revision for each in await served.engine.list_loras() if each.name == name]
    return known[0] + 1 if known and load_inplace else 0


class UnloadLoraBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    lora_name: str
    lora_int_id: int | None = None


async def unload_lora(served: Served, asked: Asked) -> Reply:
    """Remove an adapter."""
    name = asked.body.lora_name
    if not name:
        raise RequestError.for_field("lora_name", name, "the name of an adapter that is loaded")
    with by_route_names({}):
        is_removed = await served.engine.remove_lora(name)
    if not is_removed:
        names = ", ".join(f"'{adapter.name}'" for adapter in await served.engine.list_loras())
        known = f"this server has {names}" if names else "none is loaded"
        raise HttpProblem(404, f"There is no adapter '{name:.200}': {known}.", field="lora_name")
    return Reply({"success": True, "message": f"LoRA adapter '{name}' is removed."})


async def broadcaster(served: Served, asked: Asked) -> Reply:
    """Prime-rl's own NCCL group is not served."""
    raise served.not_supported("/init_broadcaster is not served: send weights by /update_weights {weight_dir}.")
