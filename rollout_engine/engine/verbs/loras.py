"""Verbs on LoRA adapters: add, remove, list, pin. Adapters: `rollout_engine.base.lora_request`."""

from rollout_engine.base.lora_request import LoRAInfo, LoRALike, LoRARequest, as_lora_request
from rollout_engine.base.messages import KvMode
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.engine.adapters import ensure_adapter, load_adapter, remove_adapter, update_adapter
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.verb import Arguments
from rollout_engine.engine.verb_table import VERBS


def _prepare_add(lora_request: LoRARequest, timeout: float | None) -> Arguments:
    return {"lora_request": as_lora_request(lora_request).sendable(), "timeout": timeout}


def _prepare_name(lora_request: LoRALike, timeout: float | None) -> Arguments:
    return {"lora_request": as_lora_request(lora_request).name, "timeout": timeout}


def _always(driver: EngineDriver, arguments: Arguments) -> bool:
    return True


@VERBS.add(prepare=_prepare_add, beside_steps=_always)
def add_lora(driver: EngineDriver, lora_request: LoRARequest, *, timeout: float | None = None) -> LoRAInfo:
    """Load a LoRA adapter from a directory or from tensors, while steps run, and put it in place between two of them.

    `EngineConfig.max_loras` are held at a time: if all slots are taken, the adapter that no request has named for
    longest gives way, unless it is pinned or unfinished requests use it. The same values again change nothing. Other
    values under a known name need a higher `revision`; then requests in flight continue under them, over the KV they
    have, and the engine's policy version grows by one: `version_spans` distinguish the tokens. It grows too if a name
    that was removed returns with other values.

    Raises `RequestError`, naming the field, for an adapter that cannot be read, is of another base model, or has a
    rank, a target or an option that is not served; `LifecycleError` if no slot is free, and if the engine
    computes no adapters: on a device, with deterministic=False.
    """
    return load_adapter(driver, lora_request, "add_lora")


@VERBS.add(prepare=_prepare_name, beside_steps=_always)
def remove_lora(driver: EngineDriver, lora_request: str, *, timeout: float | None = None) -> bool:
    """Remove an adapter by its name; False if there is none. Raises `LifecycleError` while requests use it."""
    return remove_adapter(driver, lora_request)


@VERBS.add(when="any time")
def list_loras(driver: EngineDriver, *, timeout: float | None = None) -> list[LoRAInfo]:
    """The adapters that the engine holds, in the order in which they were added."""
    return driver.core.adapters.list()


@VERBS.add(prepare=_prepare_name)
def pin_lora(driver: EngineDriver, lora_request: str, *, timeout: float | None = None) -> LoRAInfo:
    """Keep an adapter until it is removed: it never gives way to others. Raises `RequestError` for an unknown name."""
    return driver.core.adapters.pin(lora_request)


@VERBS.add(prepare=_prepare_add, beside_steps=_always, public=False)
def ensure_lora(driver: EngineDriver, lora_request: LoRARequest, *, timeout: float | None = None) -> LoRAInfo:
    """Load the adapter that a request carries, unless it is there in this revision or a later one."""
    return ensure_adapter(driver, lora_request)


def _prepare_update(lora_request: LoRARequest, version: int | None, kv: KvMode, timeout: float | None) -> Arguments:
    return {"lora_request": lora_request.sendable(), "version": version, "kv": kv, "timeout": timeout}


@VERBS.add(prepare=_prepare_update, beside_steps=_always, public=False)
def update_lora(
    driver: EngineDriver,
    lora_request: LoRARequest,
    version: int | None = None,
    kv: KvMode = "keep",
    *,
    timeout: float | None = None,
) -> UpdateReport:
    """Load an adapter's values as a policy version, by default one more than the live one, whatever its revision is."""
    return driver.core.stats.updates.count(lambda: update_adapter(driver, lora_request, version, kv))
