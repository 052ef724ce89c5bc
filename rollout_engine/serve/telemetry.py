"""Metrics for Prometheus, and profiles of the engine."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.sessions.registry import Sessions
from rollout_engine.telemetry.peer_metrics import sglang_families, vllm_families
from rollout_engine.telemetry.prometheus import Labels, as_text, counters, gauge, own_families

_ACTIVITIES = {"CPU", "GPU", "CUDA"}


async def metrics(served: Served, asked: Asked) -> Reply:
    """Metrics for Prometheus: `rollout_engine_*`, and those of `vllm:*` and `sglang:*` that dashboards read."""
    found, model = await served.engine.get_metrics(), served.model
    info = served.engine.frontend.client.info
    cache = {
        "block_size": str(info.block_size),
        "cache_dtype": info.dtype,
        "enable_prefix_caching": str(info.config.enable_prefix_caching),
        "gpu_memory_utilization": str(info.config.gpu_memory_utilization),
        "num_gpu_blocks": str(info.num_blocks),
    }
    families = [
        *own_families(found, {"engine": "0"}),
        *(_session_families(served.sessions.registry, {"engine": "0"}) if served.sessions.are_on else ()),
        *vllm_families(found, model, cache),
        *sglang_families(found, model),
    ]
    return Reply(as_text(families), content_type=CONTENT_TYPE_LATEST)


def _session_families(sessions: Sessions, labels: Labels) -> Iterator[Metric]:
    """The metrics of sessions of agents."""
    memory = sessions.memory
    for name, text, value in (
        ("sessions", "Sessions that are kept.", len(sessions)),
        ("sessions_bytes", "Approximate memory of all of them.", memory.num_bytes),
        ("sessions_bytes_limit", "Its bound, all_sessions_bytes.", memory.most),
    ):
        yield gauge(f"rollout_engine_{name}", text, value, labels)
    refused = sorted(sessions.num_refused.items())
    yield counters("rollout_engine_session_requests_refused", "Refused for a bound.", "bound", refused, labels)


_REFUSED: dict[str, str] = {
    "start_step": "a profile begins at once: call when the steps to skip are over",
    "profile_by_stage": "a step computes prompts and samples together",
    "profile_stages": "a step computes prompts and samples together",
    "merge_profiles": "each replica has one trace, and they stay apart",
    "profile_prefix": "traces are named by host, process and time: give another output_dir",
    "profile_id": "traces are named by host, process and time: give another output_dir",
}
"""Fields that ask for data that a profile here does not have, and why."""


async def start_profile(
    served: Served,
    asked: Asked,
    *,
    output_dir: str | None = None,
    num_steps: int | None = None,
    with_stack: bool | None = None,
    record_shapes: bool | None = None,
    profile_memory: bool | None = None,
    activities: list[str] | None = None,
    start_step: int | None = None,
    profile_by_stage: bool = False,
    profile_stages: list[str] | None = None,
    merge_profiles: bool = False,
    profile_prefix: str | None = None,
    profile_id: str | None = None,
) -> Reply:
    """Begin a profile by torch's profiler; with `num_steps` it ends by itself."""
    _check(asked.body, on_device=served.engine.frontend.client.info.config.device == "cuda")
    try:
        await served.engine.start_profile(
            output_dir,
            num_steps=num_steps,
            with_stack=bool(with_stack),
            record_shapes=bool(record_shapes),
            profile_memory=bool(profile_memory),
        )
    except RequestError as problem:
        if problem.field != "directory":
            raise
        message = f"{problem} Over HTTP it is output_dir."
        raise HttpProblem(400, message, field="output_dir") from problem
    return Reply({"success": True, "message": "Start profiling."})


async def stop_profile(served: Served, asked: Asked) -> Reply:
    """End the profile and tell where its Chrome traces are, one per replica, on the disk of the engine's machine."""
    paths = await served.engine.stop_profile()
    return Reply({"success": True, "message": "Stop profiling.", "traces": paths})


def _check(body: Any, *, on_device: bool) -> None:
    for name, reason in _REFUSED.items():
        value: Any = getattr(body, name)
        if value:
            raise HttpProblem(400, f"/start_profile: {name}={value!r:.80} cannot be had: {reason}.", field=name)
    if body.activities is None:
        return
    asked = {each.upper() for each in body.activities}
    missing = {"CPU"} - asked or ({"GPU"} if on_device and not asked & {"GPU", "CUDA"} else set())
    if missing or not asked <= _ACTIVITIES:
        has = "the host's work (CPU) and the device's (GPU), both always"
        message = f"/start_profile: activities={body.activities!r:.80} cannot be had: a trace has {has}. Leave it out."
        raise HttpProblem(400, message, field="activities")
