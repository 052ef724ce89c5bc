"""The adapters that requests may name: a fixed number of slots, from which the least recently used one gives way."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from rollout_engine.base.errors import LifecycleError, RequestError, StaleVersionError, unknown_name
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest

_MAX_REMEMBERED = 10_000
"""Names of adapters that are gone whose values are remembered by their digests."""


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter in a slot."""

    slot: int
    """The slot in which the model runner has its matrices."""
    info: LoRAInfo
    serial: int
    """Number of these values, from 1, never used again: KV is keyed by it. Base requests have 0."""
    last_used: int
    """When a request last named it, on a clock that counts such events."""


class AdapterTable:
    """Adapters by name, in `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_name: dict[str, Adapter] = {}
        self._last_digests: dict[str, str] = {}
        """By name, of the values that an adapter has or had last, the newest at the end."""
        self._clock = self._num_serials = 0

    @property
    def num_slots(self) -> int:
        """How many adapters there may be."""
        return self._num_slots

    def list(self) -> list[LoRAInfo]:
        """Every adapter, in the order of their arrival."""
        return [adapter.info for adapter in self._by_name.values()]

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name, if there is one."""
        return self._by_name.get(name)

    def get(self, name: str) -> Adapter:
        """The adapter of this name. Raises `RequestError`."""
        adapter = self._by_name.get(name)
        if adapter is None:
            known = unknown_name("adapter", name, self._by_name) if self._by_name else f"Unknown adapter '{name}'."
            hint = "Add it first, by add_lora; as lora_request= of generate a LoRARequest may bring its path or tensors"
            raise RequestError(f"lora_request: {known} {hint}.", field="lora_request", value=name)
        return adapter

    def use(self, name: str) -> Adapter:
        """The adapter of this name, which a new request uses. Raises `RequestError`."""
        adapter = self.get(name)
        adapter.last_used = self._tick()
        return adapter

    def find_served(self, request: LoRARequest) -> LoRAInfo | None:
        """The adapter of a request, if it is there in this revision or a later one; None: load it.

        Raises `RequestError` for an unknown name without values.
        """
        if not request.has_values:
            return self.get(request.name).info
        known = self._by_name.get(request.name)
        return known.info if known is not None and known.info.revision >= request.revision else None

    def plan_add(self, info: LoRAInfo, live: int) -> LoRAInfo | None:
        """Decide the policy version of an adapter that is added while `live` serves; None: its values are there.

        Values are a new version if others were served under their name, even if that is gone. Those that are there
        get this revision if it is higher. Raises `RequestError` for other values without a higher revision.
        """
        known = self._by_name.get(info.name)
        if known is not None and known.info.digest == info.digest:
            known.info = msgspec.structs.replace(known.info, revision=max(info.revision, known.info.revision))
            return None
        if known is not None and info.revision <= known.info.revision:
            bound = f"more than {known.info.revision}, the revision of the adapter '{info.name}' that is served"
            hint = "Its values are other ones than these; remove_lora first where numbers begin anew."
            raise RequestError.for_field("revision", info.revision, bound, hint)
        changes = known is not None or self._last_digests.get(info.name, info.digest) != info.digest
        return msgspec.structs.replace(info, policy_version=live + changes)

    def plan_update(self, info: LoRAInfo, version: int | None, live: int) -> LoRAInfo | None:
        """Decide version and revision of an adapter that is to serve as `version`; None: its values do already.

        `version=None`: the one after `live`. Raises `StaleVersionError` for one that is not higher than `live`.
        """
        known = self._by_name.get(info.name)
        if known is not None and (known.info.digest, known.info.policy_version) == (info.digest, version):
            return None
        number = live + 1 if version is None else version
        if number <= live:
            bound = f"must be more than {live}, the live version"
            raise StaleVersionError(f"update_weights: version={number} is not allowed: {bound}.")
        revision = info.revision if known is None else max(known.info.revision + 1, info.revision)
        return msgspec.structs.replace(info, revision=revision, policy_version=number)

    def place(self, name: str, num_uses: Callable[[Adapter], int]) -> int:
        """The slot for an adapter: its own, a free one, or that of the least recently used, which is removed.

        `num_uses`: unfinished requests of an adapter. Raises `LifecycleError` if all are pinned or in use.
        """
        known = self._by_name.get(name)
        if known is not None:
            return known.slot
        taken = {adapter.slot for adapter in self._by_name.values()}
        if len(taken) < self._num_slots:
            return min(set(range(self._num_slots)) - taken)
        idle = [each for each in self._by_name.values() if not each.info.is_pinned and not num_uses(each)]
        if not idle:
            held = ", ".join(f"'{each.info.name}' ({_why(each, num_uses(each))})" for each in self._by_name.values())
            what = f"add_lora: no slot is free for '{name}'; max_loras={self._num_slots}, and none can give way: {held}"
            raise LifecycleError(f"{what}. Remove one, wait for its requests, or make the engine with more.")
        oldest = min(idle, key=lambda each: each.last_used)
        del self._by_name[oldest.info.name]
        return oldest.slot

    def put(self, slot: int, info: LoRAInfo) -> Adapter:
        """Put an adapter into a slot that `place` has given for it. Requests that used the values before continue.

        One that is pinned stays so.
        """
        self._num_serials += 1
        known = self._by_name.get(info.name)
        if known is not None and known.info.is_pinned:
            info = msgspec.structs.replace(info, is_pinned=True)
        self._last_digests.pop(info.name, None)
        self._last_digests[info.name] = info.digest
        if len(self._last_digests) > self._num_slots + _MAX_REMEMBERED:
            del self._last_digests[next(iter(self._last_digests))]
        if known is None:
            known = self._by_name[info.name] = Adapter(slot, info, self._num_serials, self._tick())
        else:
            known.info, known.serial = info, self._num_serials
        return known

    def pin(self, name: str) -> LoRAInfo:
        """Keep an adapter until it is removed. Raises `RequestError` for an unknown name."""
        adapter = self.get(name)
        adapter.info = msgspec.structs.replace(adapter.info, is_pinned=True)
        return adapter.info

    def check_unused(self, name: str, num_uses: Callable[[Adapter], int]) -> None:
        """Raise `LifecycleError` while requests use an adapter. No-op if there is none."""
        adapter = self._by_name.get(name)
        if adapter is not None and (count := num_uses(adapter)):
            what = f"remove_lora: {count} unfinished requests use '{name}'"
            raise LifecycleError(f"{what}: wait for them, or abort them.")

    def remove(self, name: str, num_uses: Callable[[Adapter], int]) -> Adapter | None:
        """Remove an adapter; None if there is none. Raises `LifecycleError` while requests use it."""
        self.check_unused(name, num_uses)
        return self._by_name.pop(name, None)

    def copy(self) -> "AdapterTable":
        """The same adapters in the same slots, in a table of its own."""
        made = AdapterTable(self._num_slots)
        made._by_name = {name: replace(adapter) for name, adapter in self._by_name.items()}
        made._last_digests = self._last_digests.copy()
        made._clock, made._num_serials = self._clock, self._num_serials
        return made

    def check_integrity(self) -> None:
        """Assert that no two adapters share a slot or a serial number."""
        adapters = list(self._by_name.values())
        assert len({each.slot for each in adapters}) == len(adapters) <= self._num_slots, "two adapters share a slot"
        assert all(0 <= each.slot < self._num_slots for each in adapters), "a slot does not exist"
        assert len({each.serial for each in adapters}) == len(adapters), "two adapters share a serial number"

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _why(adapter: Adapter, num_uses: int) -> str:
    return "pinned" if adapter.info.is_pinned else f"{num_uses} requests"
