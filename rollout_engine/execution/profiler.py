"""Profiles of the process that runs the model: torch's profiler, and a Chrome trace on disk."""

import itertools
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile, record_function, supported_activities

from rollout_engine.base.errors import LifecycleError, RequestError, RolloutEngineError, refused
from rollout_engine.base.messages import SchedulerOutput

logger = logging.getLogger("rollout_engine")

_NOTHING = nullcontext()
_NUMBERS = itertools.count(1)
_TURN = threading.Lock()
"""Held while a profile runs: a process has one profiler."""


class Profiler:
    """Profiles one engine, once at a time. `directory`: for traces that name no other.

    A trace has every thread of the process, the device's work if there is a device, and a mark around each step.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._profile: profile | None = None
        self._path = Path()
        self._num_left: int | None = None
        self._started_ns = 0
        self._ended: str | RolloutEngineError | None = None
        """Path of the trace, or why there is none, of a profile that ended after its `num_steps`."""

    def start(self, directory: str | None, num_steps: int | None = None, **options: bool) -> None:
        """Begin a profile, which ends after `num_steps`, if given. Raises as the verb `start_profile`.

        `options`: with_stack, record_shapes and profile_memory, as torch's profiler takes them.
        """
        if self._profile is not None:
            raise LifecycleError(f"start_profile: a profile is running ({self._path}): call stop_profile() first.")
        path = self._new_file(directory)
        if not _TURN.acquire(blocking=False):
            path.unlink()
            what = "start_profile: another engine of this process is being profiled"
            raise LifecycleError(f"{what}, and a process has one profiler: call its stop_profile() first.")
        try:
            self._profile = _start_profile(options)
        except BaseException:
            _TURN.release()
            path.unlink()
            raise
        self._started_ns = time.time_ns()
        self._path, self._num_left, self._ended = path, num_steps, None

    def stop(self) -> str:
        """End the profile and return the path of its trace. Raises as the verb `stop_profile`."""
        if self._profile is None:
            ended, self._ended = self._ended, None
            if ended is None:
                raise LifecycleError("stop_profile: no profile is running: call start_profile() first.")
            if isinstance(ended, RolloutEngineError):
                raise ended
            return ended
        running, self._profile = self._profile, None
        try:
            running.stop()
            self._require_whole(running)
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as problem:
            raise RolloutEngineError(f"stop_profile: {self._path} cannot be written: {problem}.") from problem
        finally:
            _TURN.release()
        logger.info("trace of a profile: %s", self._path)
        return str(self._path)

    def mark(self, work: SchedulerOutput) -> AbstractContextManager[object]:
        """Show in the trace, while there is one, that a step runs inside this block."""
        return _NOTHING if self._profile is None or not work.scheduled else self._mark_step(work)

    def close(self) -> None:
        """End the profile of an engine that is shut down; its trace is kept."""
        if self._profile is not None:
            self._end()

    @contextmanager
    def _mark_step(self, work: SchedulerOutput) -> Iterator[None]:
        num_tokens = sum(row.num_scheduled_tokens for row in work.scheduled)
        with record_function(f"step {work.step}: {len(work.scheduled)} sequences, {num_tokens} tokens"):
            yield
        if self._num_left is not None:
            self._num_left -= 1
            if self._num_left == 0:
                self._end()

    def _require_whole(self, ended: profile) -> None:
        """Raise if another profile of this process began meanwhile: torch silently ends the first then."""
        results = ended.profiler and ended.profiler.kineto_results
        if results and 0 < results.trace_start_ns() <= self._started_ns:
            return
        self._path.unlink()
        what = "stop_profile: another profile of this process began meanwhile, and took this one's place"
        raise RolloutEngineError(f"{what}: there is no trace of it. Profile one at a time.")

    def _end(self) -> None:
        """End the profile unasked; `stop` returns its path still, or raises why there is none."""
        try:
            self._ended = self.stop()
        except RolloutEngineError as problem:
            self._ended = problem
            logger.error("%s", problem)

    def _new_file(self, directory: str | None) -> Path:
        """An empty file of a new name: host, process and time, so that those of many replicas do not clash."""
        chosen = self._directory if directory is None else directory
        if not chosen:
            raise _make_refusal(chosen, "Give start_profile(directory), or the engine EngineConfig(profiler_dir=...).")
        if directory and not os.path.isabs(directory):  # faces make it so: only a message of another's making is not
            raise _make_refusal(directory, "Its path must be absolute.")
        now = time.strftime("%Y%m%dT%H%M%S")
        name = f"rollout_engine-{platform.node()}-{os.getpid()}-{now}-{next(_NUMBERS)}.pt.trace.json"
        path = Path(os.path.abspath(chosen), name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        except (OSError, ValueError) as problem:
            raise _make_refusal(chosen, f"({problem})") from problem
        return path


def _start_profile(options: Mapping[str, Any]) -> profile:
    from torch._C._profiler import _ExperimentalConfig

    if autograd_profiler._is_profiler_enabled:  # torch would end that one without a word
        what = "start_profile: your own code profiles this process by torch's profiler, of which there is one"
        raise LifecycleError(f"{what}: end that first, or have the engine in a process of its own (AsyncLLM).")
    made = profile(
        **options,
        activities=supported_activities(),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # any thread may run the next step
    )
    made.start()
    return made


def _make_refusal(directory: str | None, hint: str) -> RequestError:
    bound = "a directory that the engine can write to"
    message = f"start_profile: {refused('directory', directory, bound, hint)}"
    return RequestError(message, field="directory", value=directory, bound=bound)
