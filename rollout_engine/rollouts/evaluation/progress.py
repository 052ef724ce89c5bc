"""Progress of an evaluation: by rich where it is installed, else by tqdm."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from rollout_engine.telemetry.progress import REFRESH_SECONDS, ProgressBar


class EvalProgress:
    """Groups of samples that are done, tokens per second, and the checkpoint that is sampled now."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        """`done`: groups that an earlier run of the evaluation has made."""
        self._start = self._shown_at = time.monotonic()
        self._num_tokens, self._name = 0, ""
        self._rich: Any = None
        self._plain: ProgressBar | None = None
        if shown and find_spec("rich") is not None:
            self._rich = _rich_bar()
            self._task = self._rich.add_task("", total=total, completed=done, speed="")
            self._rich.start()
        else:
            self._plain = ProgressBar(total - done, desc="evaluate", unit="group", shown=shown)

    def begin(self, checkpoint: str) -> None:
        """Say which checkpoint is sampled from now on."""
        if self._rich is not None:
            self._rich.update(self._task, description=checkpoint[-40:])

    def count(self, num_tokens: int) -> None:
        """Count a group as done, with `num_tokens` tokens."""
        self._num_tokens += num_tokens
        if self._plain is not None:
            self._plain.update(num_tokens)
        else:
            self._rich.advance(self._task)

    def show(self, num_open_tokens: Callable[[], int]) -> None:
        """Show the tokens of groups that are not done too, at most five times a second."""
        if self._plain is not None:
            self._plain.count(num_open_tokens)
        elif time.monotonic() - self._shown_at > REFRESH_SECONDS:
            self._shown_at = time.monotonic()
            speed = (self._num_tokens + num_open_tokens()) / (self._shown_at - self._start)
            self._rich.update(self._task, speed=f"{speed:,.0f} tokens/s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._plain is not None:
            self._plain.__exit__(kind, error, trace)


def _rich_bar() -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("evaluate {task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[speed]}", markup=False),
        progress.TimeRemainingColumn(),
    )
