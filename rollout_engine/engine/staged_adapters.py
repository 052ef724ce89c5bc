"""The adapters of one replica of a fleet: staged while steps run, then all of them put in place between two."""

import time
from collections.abc import Mapping, Sequence

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.base.messages import KvMode
from rollout_engine.engine.adapters import as_version, info_of, install
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.model.adapters.pool import PreparedAdapter


class StagedAdapters:
    """Adapters that were read and checked for a client, until it commits the set that the engine is to have."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self._staged: dict[int, dict[str, PreparedAdapter]] = {}
        """By client, then by digest."""

    def stage(self, request: LoRARequest, verb: str) -> LoRAInfo:
        """Read an adapter and check it. Steps may run meanwhile. Raises as `add_lora`; `verb`: the user's."""
        prepared = self._driver.executor.require_adapters(verb).prepare_adapter(request)
        staged = self._staged.setdefault(self._driver.caller, {})
        staged[prepared.digest] = prepared
        while len(staged) > self._driver.core.adapters.num_slots:  # a client that stages and never commits
            del staged[next(iter(staged))]
        return info_of(request, prepared, self._driver.core.policy_version)

    def commit(self, loras: Sequence[LoRAInfo], version: int, kv: KvMode, verb: str) -> tuple[float, int]:
        """Replace all adapters by these, as policy version `version`, at a step boundary.

        Their values are those that have been staged, or are in place. Returns the seconds without steps and the number
        of requests in flight. Raises `LifecycleError`, nothing changed, if requests use an adapter that is to go, or
        the state does not allow another version; the error names `verb`.
        """
        staged, driver = self._staged.pop(self._driver.caller, {}), self._driver
        start = time.perf_counter()
        with driver.boundary():
            stalled, core = time.perf_counter(), driver.core
            gone = {info.name for info in core.adapters.list()} - {info.name for info in loras}
            for name in gone:
                core.adapters.check_unused(name, core.num_using)
            self._check_staged(loras, staged, verb)
            changes = version != core.policy_version
            with as_version(driver, version, kv, verb):
                self._exchange(gone, loras, staged, verb)
            if changes:
                num_bytes = sum(each.num_bytes for each in staged.values())
                now = time.perf_counter()
                core.stats.updates.add_complete(now - start, now - stalled, num_bytes)
            return time.perf_counter() - stalled, core.num_unfinished_requests

    def leave(self, client_index: int) -> None:
        """Drop the adapters that a client has staged and will not commit."""
        self._staged.pop(client_index, None)

    def _check_staged(self, loras: Sequence[LoRAInfo], staged: Mapping[str, PreparedAdapter], verb: str) -> None:
        """Raise `LifecycleError` if the values of an adapter are not here."""
        for info in loras:
            known = self._driver.core.adapters.find(info.name)
            if (known is None or known.info.digest != info.digest) and info.digest not in staged:
                raise LifecycleError(f"{verb}: the values of adapter '{info.name}' are not staged: stage them first.")

    def _exchange(
        self, gone: set[str], loras: Sequence[LoRAInfo], staged: Mapping[str, PreparedAdapter], verb: str
    ) -> None:
        core = self._driver.core
        if not gone and not loras:
            return
        pool = self._driver.executor.require_adapters(verb)
        for name in gone:
            removed = core.adapters.remove(name, core.num_using)
            if removed is not None:
                pool.remove(removed.slot)
        for info in loras:
            known = core.adapters.find(info.name)
            if known is not None and known.info.digest == info.digest:
                known.info = info
            else:
                install(self._driver, pool, staged[info.digest], info)
