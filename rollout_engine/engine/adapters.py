"""Adapters of one engine: loaded concurrently with steps, put in place and removed between two of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from rollout_engine.base.errors import StaleVersionError
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
        core = driver.core
        if not core.adapters.check_values(request.name, request.revision, prepared.digest):
            return core.adapters.renumber(request.name, request.revision)
        if not core.adapters.changes_version(request.name, prepared.digest):
            return _install(driver, pool, request, prepared, core.policy_version)
        return _swap(driver, pool, request, prepared, verb, core.policy_version + 1)


def ensure_adapter(driver: EngineDriver, request: LoRARequest) -> LoRAInfo:
    """Load an adapter unless it is there in this revision or a later one."""
    known = driver.core.adapters.find(request.name)
    if known is not None and (known.info.revision >= request.revision or not request.has_values):
        return known.info
    if not request.has_values:
        return driver.core.adapters.get(request.name).info
    return load_adapter(driver, request, "add_lora")


def update_adapter(driver: EngineDriver, request: LoRARequest, version: int | None, kv: KvMode) -> UpdateReport:
    """Load an adapter's values as policy version `version`, None: the next one. Raises as `update_weights`."""
    start = time.perf_counter()
    pool = driver.executor.require_adapters("update_weights")
    prepared = pool.prepare_adapter(request)
    with driver.boundary():
        stalled, core = time.perf_counter(), driver.core
        known = core.adapters.find(request.name)
        number = core.policy_version + 1 if version is None else version
        changes = known is None or (known.info.digest, known.info.policy_version) != (prepared.digest, number)
        if changes:
            next_version(number, core.policy_version)
            revision = 0 if known is None else known.info.revision + 1
            request = msgspec.structs.replace(request, revision=max(revision, request.revision))
            _swap(driver, pool, request, prepared, "update_weights", number, kv)
        resumed = time.perf_counter()
        num_in_flight = core.num_unfinished_requests
    sizes = prepared.num_tensors, prepared.num_bytes
    times = resumed - start, resumed - stalled
    taken = prepared.num_bytes if changes else 0
    return UpdateReport(number, prepared.digest, *sizes, *times, num_in_flight, num_bytes_sent=taken)


def next_version(version: int | None, live: int) -> int:
    """The version of an update, None: the one after `live`. Raises `StaleVersionError` for one that does not grow."""
    number = live + 1 if version is None else version
    if number <= live:
        bound = f"must be more than {live}, the live version"
        raise StaleVersionError(f"update_weights: version={number} is not allowed: {bound}.")
    return number


def remove_adapter(driver: EngineDriver, name: str) -> bool:
    """Remove an adapter between two steps; False if there is none. Raises `LifecycleError` while requests use it."""
    with driver.boundary():
        removed = driver.core.adapters.remove(name, driver.core.num_using)
        if removed is not None:
            driver.executor.require_adapters("remove_lora").remove(removed.slot)
        return removed is not None


def _swap(
    driver: EngineDriver,
    pool: Adapters,
    request: LoRARequest,
    prepared: PreparedAdapter,
    verb: str,
    version: int,
    kv: KvMode = "keep",
) -> LoRAInfo:
    """Install an adapter as a new policy version."""
    with new_version(driver, version, kv, verb):
        return _install(driver, pool, request, prepared, version)


@contextmanager
def new_version(driver: EngineDriver, version: int, kv: KvMode, verb: str) -> Iterator[None]:
    """Commit the block's change of adapters as a policy version. Raises `LifecycleError`, naming `verb`."""
    driver.core.begin_update(verb)
    try:
        yield
        driver.core.commit_version(version, kv)
        driver.executor.updater.version = version
    finally:
        driver.core.end_update(dirty=driver.executor.dirty)


def _install(
    driver: EngineDriver, pool: Adapters, request: LoRARequest, prepared: PreparedAdapter, version: int
) -> LoRAInfo:
    table = driver.core.adapters
    slot = table.place(request.name, driver.core.num_using)
    info = LoRAInfo(
        name=request.name,
        revision=request.revision,
        rank=prepared.rank,
        num_bytes=prepared.num_bytes,
        digest=prepared.digest,
        policy_version=version,
    )
    pool.install(slot, prepared)
    return table.put(slot, info).info
