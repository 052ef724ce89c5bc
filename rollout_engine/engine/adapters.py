"""Adapters of one engine: loaded beside steps, put in place and taken away between two."""

from rollout_engine.engine.driver import EngineDriver
from rollout_engine.lora_request import LoRAInfo, LoRARequest
from rollout_engine.model.adapters.pool import AdapterPool, PreparedAdapter


def load_adapter(driver: EngineDriver, request: LoRARequest, verb: str) -> LoRAInfo:
    """Read an adapter, check it, and put it in a slot between two steps. Raises as `add_lora`; `verb`: the caller's."""
    pool = driver.executor.require_adapters(verb)
    prepared = pool.prepare(request)
    with driver.boundary():
        table = driver.core.adapters
        known = table.find(request.name)
        if table.check_values(request.name, request.revision, prepared.digest):
            return _put(driver, pool, request, prepared)
        assert known is not None, "values that are not new are known"
        return table.renumber(request.name, request.revision)


def ensure_adapter(driver: EngineDriver, request: LoRARequest) -> LoRAInfo:
    """Load an adapter unless it is there in this revision or a later one."""
    known = driver.core.adapters.find(request.name)
    if known is not None and (known.info.revision >= request.revision or not request.has_values):
        return known.info
    if not request.has_values:
        return driver.core.adapters.get(request.name).info
    return load_adapter(driver, request, "add_lora")


def remove_adapter(driver: EngineDriver, name: str) -> bool:
    """Remove an adapter between two steps; False where there is none. Raises `LifecycleError` while requests use it."""
    with driver.boundary():
        removed = driver.core.adapters.remove(name, driver.core.num_using)
        if removed is not None:
            driver.executor.require_adapters("remove_lora").remove(removed.slot)
        return removed is not None


def _put(driver: EngineDriver, pool: AdapterPool, request: LoRARequest, prepared: PreparedAdapter) -> LoRAInfo:
    """Have an adapter in a slot. Other values under a known name are a new policy version, as other weights are."""
    core, known = driver.core, driver.core.adapters.find(request.name)
    if known is None:
        return _install(driver, pool, request, prepared)
    core.begin_update("add_lora")
    try:
        info = _install(driver, pool, request, prepared, version=core.policy_version + 1)
        core.commit_version(info.policy_version)
        driver.executor.updater.version = info.policy_version
        return info
    finally:
        core.end_update(dirty=driver.executor.dirty)


def _install(
    driver: EngineDriver,
    pool: AdapterPool,
    request: LoRARequest,
    prepared: PreparedAdapter,
    version: int | None = None,
) -> LoRAInfo:
    core = driver.core
    slot = core.adapters.place(request.name, core.num_using)
    known = core.adapters.find(request.name)
    info = LoRAInfo(
        request.name,
        request.revision,
        prepared.rank,
        prepared.num_bytes,
        prepared.digest,
        core.policy_version if version is None else version,
        known is not None and known.info.is_pinned,
    )
    pool.install(slot, prepared)
    return core.adapters.put(slot, info).info
