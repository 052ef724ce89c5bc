"""A progress bar that never costs a result: where it cannot be shown, it is left out with one warning."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

logger = logging.getLogger("rollout_engine")


class ProgressBar:
    """tqdm over `total` prompts or groups, with the speed in tokens per second."""

    def __init__(self, total: int, *, desc: str, unit: str, shown: bool) -> None:
        self._start, self._num_tokens = time.monotonic(), 0
        self._bar: Any = None
        if shown:
            self._bar = self._fenced(lambda: tqdm(total=total, desc=desc, unit=unit))

    def update(self, num_tokens: int) -> None:
        """One more is complete, with `num_tokens` tokens."""
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._fenced(self._show)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._fenced(self._bar.close)

    def _show(self) -> None:
        speed = self._num_tokens / (time.monotonic() - self._start)
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        self._bar.update()

    def _fenced(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as problem:  # a closed terminal, a full disk
            self._bar = None
            logger.warning("the progress bar is left out: %s: %s", type(problem).__name__, problem)
            return None
