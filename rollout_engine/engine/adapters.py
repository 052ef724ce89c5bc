"""Adapters of one engine: loaded concurrently with steps, put in place and removed between two of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.base.messages import KvMode
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.model.adapters.pool import Adapters, PreparedAdapter


def load_adapter(driver: EngineDriver, request: LoRARequest, verb: str) -> LoRAInfo:
    """Read an adapter, check it, and put it in a slot between two steps. Raises as `add_lora`; `verb`: the caller's.

    Other values than those served last under its name are a new policy version, as other weights are.
    """
    pool = driver.executor.require_adapters(verb)
    prepared = pool.prepare_adapter(request)
    with driver.boundary():
        table, live = driver.core.adapters, driver.core.policy_version
        info = table.plan_add(info_of(request, prepared, live), live)
        if info is not None:
            _put(driver, pool, prepared, info, verb)
        return table.get(request.name).info


def ensure_adapter(driver: EngineDriver, request: LoRARequest) -> LoRAInfo:
    """Load an adapter unless it is there in this revision or a later one."""
    return driver.core.adapters.find_served(request) or load_adapter(driver, request, "add_lora")


def update_adapter(driver: EngineDriver, request: LoRARequest, version: int | None, kv: KvMode) -> UpdateReport:
    """Load an adapter's values as policy version `version`, None: the next one. Raises as `update_weights`."""
    start = time.perf_counter()
    pool = driver.executor.require_adapters("update_weights")
    prepared = pool.prepare_adapter(request)
    with driver.boundary():
        stalled, core = time.perf_counter(), driver.core
        live = core.policy_version
        info = core.adapters.plan_update(info_of(request, prepared, live), version, live)
        if info is not None:
            _put(driver, pool, prepared, info, "update_weights", kv)
        resumed = time.perf_counter()
        num_in_flight = core.num_unfinished_requests
        number = core.adapters.get(request.name).info.policy_version
    sizes = prepared.num_tensors, prepared.num_bytes
    times = resumed - start, resumed - stalled
    taken = 0 if info is None else prepared.num_bytes
    return UpdateReport(number, prepared.digest, *sizes, *times, num_in_flight, num_bytes_sent=taken)


def remove_adapter(driver: EngineDriver, name: str) -> bool:
    """Remove an adapter between two steps; False if there is none. Raises `LifecycleError` while requests use it."""
    with driver.boundary():
        removed = driver.core.adapters.remove(name, driver.core.num_using)
        if removed is not None:
            driver.executor.require_adapters("remove_lora").remove(removed.slot)
        return removed is not None


def info_of(request: LoRARequest, prepared: PreparedAdapter, version: int) -> LoRAInfo:
    """An adapter that has been read, under the revision of its request and policy version `version`."""
    return LoRAInfo(
        name=request.name,
        revision=request.revision,
        rank=prepared.rank,
        num_bytes=prepared.num_bytes,
        digest=prepared.digest,
        policy_version=version,
    )


@contextmanager
def as_version(driver: EngineDriver, version: int, kv: KvMode, verb: str) -> Iterator[None]:
    """Commit the block's change of adapters as policy version `version`, which may be the live one.

    Raises `LifecycleError`, naming `verb`, if the state does not allow another version.
    """
    if version == driver.core.policy_version:
        yield
        return
    driver.core.begin_update(verb)
    try:
        yield
        driver.core.commit_version(version, kv)
        driver.executor.updater.version = version
    finally:
        driver.core.end_update(dirty=driver.executor.dirty)


def install(driver: EngineDriver, pool: Adapters, prepared: PreparedAdapter, info: LoRAInfo) -> None:
    """Put an adapter in a slot. Call it between two steps. Raises `LifecycleError` if none is free."""
    table = driver.core.adapters
    slot = table.place(info.name, driver.core.num_using)
    pool.install(slot, prepared)
    table.put(slot, info)


def _put(
    driver: EngineDriver, pool: Adapters, prepared: PreparedAdapter, info: LoRAInfo, verb: str, kv: KvMode = "keep"
) -> None:
    with as_version(driver, info.policy_version, kv, verb):
        install(driver, pool, prepared, info)
