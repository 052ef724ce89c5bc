"""Connectors of the user's, by name: "package.module:Class", or "package.module:Class:ARGUMENT".

The engine trusts nothing that they do. Each block is given to them as a frame, with a header that names it and a
digest; a frame that they return is checked against both. An error in one of their methods is a miss, or a dropped save.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_engine.base.class_names import find_class
from rollout_engine.base.errors import ConfigError, error_text
from rollout_engine.base.user_code import UserCode
from rollout_engine.kv.block_frame import DamagedBlock, make_header, open_frame
from rollout_engine.kv.connector import KVConnector, KVConnectorStats, KVLayout, Wait
from rollout_engine.kv.counters import Counters
from rollout_engine.kv.notices import Notices

T = TypeVar("T")
_METHODS = ("open", "meet", "fetch", "load", "save", "holds", "drop", "reset", "stats", "close")
_OURS = ("num_saved", "num_saved_bytes", "num_loaded", "num_loaded_bytes", "num_misses", "save_seconds", "load_seconds")
"""Counters that are the engine's own, whatever the user's class counts."""


def load_connector(name: str, max_bytes: int | None) -> "UserConnector":
    """Make a connector by the name of its class. Raises `ConfigError` naming the class that cannot be made."""
    module, _, rest = name.partition(":")
    path, _, argument = rest.partition(":")
    try:
        made: KVConnector = find_class(f"{module}:{path}")(argument, max_bytes)
    except (Exception, SystemExit) as problem:  # whatever the user's module does when it is loaded
        raise ConfigError(f"kv_connector: '{name}' cannot be made: {error_text(problem)}") from problem
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"kv_connector: '{name}' has no method {' or '.join(missing)}; docs/kv.md has all of them.")
    return UserConnector(name, made)


class UserConnector:
    """A connector of the user's, guarded: it never raises, and never returns bytes that were not saved by that key."""

    def __init__(self, name: str, inner: KVConnector) -> None:
        self._name, self._inner = name, inner
        self._notices = Notices(name)
        self._counters = Counters()
        self._namespace = b""

    def open(self, layout: KVLayout) -> dict[str, str]:
        """Open the user's connector. Raises `ConfigError` if it cannot be, or returns no dict of texts."""
        self._namespace = bytes.fromhex(layout.namespace)
        try:
            metadata = self._inner.open(layout)
            metadata = msgspec.convert(metadata, dict[str, str])
        except ConfigError:
            raise
        except (Exception, SystemExit) as problem:
            raise ConfigError(f"kv_connector: '{self._name}' cannot be opened: {error_text(problem)}") from problem
        return {"connector": self._name, "namespace": layout.namespace} | metadata

    def meet(self, peers: Sequence[Mapping[str, str]]) -> None:
        """Hand over the metadata of the other engines. Raises `ConfigError`."""
        try:
            self._inner.meet(peers)
        except ConfigError:
            raise
        except (Exception, SystemExit) as problem:
            raise ConfigError(f"kv_connector: '{self._name}' (meet) failed: {error_text(problem)}") from problem

    def fetch(self, keys: Sequence[bytes]) -> Wait | None:
        """Begin a fetch; one that fails is done."""
        wait = self._call("fetch", None, self._inner.fetch, keys)
        return None if wait is None else lambda seconds: bool(self._call("fetch", True, wait, seconds))

    def load(self, key: bytes) -> memoryview | None:
        """Bytes of a block, checked; None for any that were not saved by this key in an engine of this layout."""
        began = time.perf_counter()
        frame = self._call("load", None, self._inner.load, key)
        data = None if frame is None else self._open_frame(key, frame)
        self._counters.count_load(data, began)
        return data

    def save(self, key: bytes, data: memoryview) -> None:
        """Hand over a frame, which does not change afterwards, so that the user's class may keep it as it is."""
        began = time.perf_counter()
        if self._call("save", False, self._save_frame, key, data):
            self._counters.count_stored(len(data))
        else:
            self._counters.add(num_dropped=1)
        self._counters.add(save_seconds=time.perf_counter() - began)

    def holds(self, key: bytes) -> bool:
        """Whether the user's connector holds the block."""
        return bool(self._call("holds", False, self._inner.holds, key))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget blocks."""
        self._call("drop", None, self._inner.drop, list(keys))

    def reset(self) -> None:
        """Forget all blocks."""
        self._call("reset", None, self._inner.reset)

    def stats(self) -> KVConnectorStats:
        """The user's counters, but those of saves and loads."""
        theirs = self._call("stats", None, self._inner.stats)
        ours = self._counters.copy()
        if not isinstance(theirs, KVConnectorStats):
            return ours
        merged = {name: getattr(ours, name) for name in _OURS}
        merged |= {
            name: getattr(theirs, name) + getattr(ours, name) for name in ("num_refused", "num_dropped", "num_failures")
        }
        return msgspec.structs.replace(theirs, **merged)

    def close(self) -> None:
        """Close the user's connector."""
        self._call("close", None, self._inner.close)

    def _save_frame(self, key: bytes, data: memoryview) -> bool:
        self._inner.save(key, memoryview(b"".join((make_header(self._namespace, key, data), data))))
        return True

    def _open_frame(self, key: bytes, frame: Any) -> memoryview | None:
        try:
            whole = memoryview(frame).cast("B")
            if not isinstance(whole.obj, bytes):  # the user's class may write to it after it was checked
                whole = memoryview(bytes(whole))
            return open_frame(whole, self._namespace, key)
        except (DamagedBlock, TypeError, ValueError, BufferError) as problem:
            self._counters.add(num_refused=1)
            self._notices.warn("damaged", f"load({key.hex()}) returned another block or none: {problem}")
        return None

    def _call(self, method: str, otherwise: T, function: Callable[..., T], *args: Any) -> T:
        """Result of the user's method; `otherwise` if it raises, which is logged once for each method."""
        try:
            with UserCode(lambda: f"KV connector {self._name} ({method})"):
                return function(*args)
        except (Exception, SystemExit) as problem:
            self._counters.add(num_failures=1)
            self._notices.warn(method, f"{method} raised {error_text(problem)}")
        return otherwise
