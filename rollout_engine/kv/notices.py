"""Log lines of a connector: one for each kind of fault, however often it happens; counters have the number."""

import logging
import threading

logger = logging.getLogger("rollout_engine")


class Notices:
    """Faults that were logged. Any thread may use it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, kind: str, text: str) -> None:
        """Log a warning, unless there was one of this kind."""
        with self._lock:
            if kind in self._kinds:
                return
            self._kinds.add(kind)
        logger.warning("KV connector %s: %s. More of this kind are counted, and not logged.", self._name, text)
