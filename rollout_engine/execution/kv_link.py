"""The KV connector of one engine, which cannot harm it.

    core     fetch, load, holds ──> KVLink ──> connector
    runner   save               ──>

An error or a hang of the connector is a miss. Calls of users' classes run on a thread of their own, and one that takes
too long is the connector's last.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, error_text, refused
from rollout_engine.base.metrics import KVTierStats
from rollout_engine.base.threads import start
from rollout_engine.kv.connector import KVConnector, KVConnectorStats, KVLayout
from rollout_engine.kv.tiers import CONNECTORS, make_connector

logger = logging.getLogger("rollout_engine")

OPEN_SECONDS = 60.0
"""Longest time in which a connector of the user's may open."""
CALL_SECONDS = 5.0
"""Longest time that a call of one may take: steps wait for it."""
FETCH_SECONDS = 30.0
"""Longest time for which a request waits for KV to be fetched."""
T = TypeVar("T")


def make_kv_connector(config: EngineConfig) -> KVConnector | None:
    """Make the connector that `config` names, if it names one, before a model is loaded. Raises `ConfigError`."""
    return None if config.kv_connector is None else make_connector(config.kv_connector, config.kv_connector_bytes)


class KVLink:
    """Satisfies `core.tier.Store` over a connector. Any thread may call it."""

    def __init__(self, connector: KVConnector, spec: str, layout: KVLayout, max_bytes: int | None = None) -> None:
        """Open the connector that `spec` names. Raises `ConfigError` if it does not, or has no room."""
        if max_bytes is not None and max_bytes < (least := max(layout.block_bytes, layout.state_bytes)):
            hint = "The number is of bytes: 8 << 30 is 8 GiB."
            raise ConfigError(
                refused("kv_connector_bytes", max_bytes, f"at least {least}, a block of this model", hint)
            )
        self.layout = layout
        self.stats = KVTierStats()
        self._connector, self._spec = connector, spec
        self._lane = None if spec.partition(":")[0] in CONNECTORS else _Lane()
        self._is_over = False
        """Whether a call has hung: no other one is made."""
        self._logged: set[str] = set()
        """Methods whose errors were logged."""
        self._last = KVConnectorStats()
        """The connector's own counters, as far as `stats` contains them."""
        try:
            handshake = self._run(partial(connector.open, layout), OPEN_SECONDS)
            self.handshake = msgspec.convert(handshake, dict[str, str])
            """Metadata for the other engines of a fleet."""
        except ConfigError:
            raise
        except Exception as problem:
            raise ConfigError(f"kv_connector={spec!r} does not open: {error_text(problem)}.") from problem

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Hand over the metadata of the other engines of a fleet."""
        self._call("meet", None, list(peers))

    def fetch(self, keys: Sequence[bytes]) -> Callable[[float], bool] | None:
        """Begin to bring blocks near; the wait that is returned is over after `FETCH_SECONDS` in any case."""
        wait: Any = self._call("fetch", None, list(keys))
        if not callable(wait):
            return None
        deadline = time.monotonic() + FETCH_SECONDS

        def is_over(seconds: float) -> bool:
            if self._is_over or time.monotonic() >= deadline:
                return True
            try:
                return bool(self._run(partial(wait, seconds), CALL_SECONDS + seconds))
            except Exception as problem:
                self._fail("fetch", problem)
                return True

        return is_over

    def load(self, key: bytes) -> memoryview | None:
        """The verified bytes of a block; None if they cannot be had."""
        begun = time.perf_counter()
        data: Any = self._call("load", None, key)
        found: memoryview | None = None
        try:
            found = None if data is None else memoryview(data).cast("B")
        except (TypeError, ValueError) as problem:
            self._fail("load", problem)
        self.stats.load_seconds += time.perf_counter() - begun
        return found

    def save(self, key: bytes, data: memoryview) -> None:
        """Hand over the bytes of a block; they may change afterwards."""
        begun = time.perf_counter()
        if self._lane is not None:  # it may read them after its time is up
            data = memoryview(bytes(data))
        self._call("save", None, key, data)
        self.stats.save_seconds += time.perf_counter() - begun

    def holds(self, key: bytes) -> bool:
        """Whether a block is held, without loading it."""
        begun = time.perf_counter()
        found = bool(self._call("holds", False, key))
        self.stats.load_seconds += time.perf_counter() - begun
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        self._call("drop", None, list(keys))

    def reset(self) -> None:
        """Forget all blocks of this engine's layout."""
        self._call("reset", None)

    def count_held(self) -> tuple[int, int]:
        """Blocks and states held, and their bytes, as far as the connector reports them."""
        found: KVConnectorStats | None = self._call("stats", None)
        if found is None:
            return 0, 0
        self.stats.num_failures += found.num_failures - self._last.num_failures
        self.stats.num_refused += found.num_refused - self._last.num_refused
        self.stats.num_dropped += found.num_dropped - self._last.num_dropped
        self._last = found
        return found.num_blocks, found.num_bytes

    def close(self) -> None:
        """End the connector."""
        self._call("close", None)
        self._is_over = True
        if self._lane is not None:
            self._lane.close()

    def _call(self, method: str, default: T, *arguments: object) -> T:
        if self._is_over:
            return default
        try:
            found: T = self._run(partial(getattr(self._connector, method), *arguments), CALL_SECONDS)
        except Exception as problem:
            self._fail(method, problem)
            return default
        return found

    def _run(self, work: Callable[[], Any], seconds: float) -> Any:
        return work() if self._lane is None else self._lane.run(work, seconds)

    def _fail(self, method: str, problem: Exception) -> None:
        """Count a failure, and log the first of each method."""
        self.stats.num_failures += 1
        if isinstance(problem, HungError):
            self._is_over = True
            logger.warning("kv_connector=%r: %s() %s; it is not called any more.", self._spec, method, problem)
        elif method not in self._logged:
            self._logged.add(method)
            what = "kv_connector=%r: %s() has failed (%s); KV is computed instead. Later failures are counted alone."
            logger.warning(what, self._spec, method, error_text(problem))


class HungError(TimeoutError):
    """A call of a connector did not return in time."""


class _Lane:
    """A thread that makes the calls of one connector, in order. One that does not return is left alone."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        start(threading.Thread(target=self._work, name="kv-connector", daemon=True))

    def run(self, work: Callable[[], Any], seconds: float) -> Any:
        """The result of a call, or its error. Raises `HungError` after `seconds`."""
        future: Future[Any] = Future()
        self._calls.put((work, future))
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            raise HungError(f"has not returned within {seconds:g} s") from None

    def close(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            try:
                future.set_result(work())
            except Exception as problem:
                future.set_exception(problem)
            except BaseException as problem:  # a cancelled call of asyncio, for one, must not end a step
                future.set_exception(RuntimeError(f"it raised {error_text(problem)}"))
