"""Shows a progress bar. If that fails it is left out with one warning, and no result is lost."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

logger = logging.getLogger("rollout_engine")

REFRESH_SECONDS = 0.2
"""Least seconds between two counts of the tokens of unfinished requests."""


class ProgressBar:
    """A tqdm bar over `total` prompts or groups, with the number of tokens sampled so far and per second."""

    def __init__(self, total: int, *, desc: str, unit: str, shown: bool, num_done: int = 0) -> None:
        """`num_done`: prompts or groups of the total that were complete before."""
        self._start = self._shown_at = time.monotonic()
        self._num_tokens = 0
        """Tokens of complete prompts or groups."""
        self._bar: Any = None
        if shown:
            self._bar = self._guard_call(lambda: tqdm(total=total, desc=desc, unit=unit, initial=num_done))

    def describe(self, desc: str) -> None:
        """Show another description in front of the bar."""
        if self._bar is not None:
            self._guard_call(lambda: self._bar.set_description(desc))

    def update(self, num_tokens: int) -> None:
        """Count one more as complete, with `num_tokens` tokens."""
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._guard_call(lambda: self._show(self._num_tokens))

    def count(self, num_open_tokens: Callable[[], int]) -> None:
        """Show the tokens of unfinished prompts or groups too, at most every `REFRESH_SECONDS`."""
        if self._bar is not None and time.monotonic() - self._shown_at > REFRESH_SECONDS:
            self._guard_call(lambda: self._show(self._num_tokens + num_open_tokens(), num_complete=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._guard_call(self._bar.close)

    def _show(self, num_tokens: int, num_complete: int = 1) -> None:
        self._shown_at = time.monotonic()
        speed = num_tokens / (self._shown_at - self._start)
        self._bar.set_postfix_str(f"{num_tokens:,} tokens, {speed:,.0f} tokens/s", refresh=not num_complete)
        if num_complete:
            self._bar.update(num_complete)

    def _guard_call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as problem:  # a closed terminal, a full disk
            self._bar = None
            logger.warning("the progress bar is left out: %s: %s", type(problem).__name__, problem)
            return None
