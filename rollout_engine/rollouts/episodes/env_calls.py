"""Runs environments of many episodes concurrently with the engine: calls return at once, `take` fetches results."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from envs_adapters.base import Action, EnvSpec
from rollout_engine.rollouts.episodes.env_call import Call, Episode, Host, Place, overdue
from rollout_engine.rollouts.episodes.env_deadlines import Deadlines
from rollout_engine.rollouts.episodes.env_host import Began, EnvFailure, EnvHost, name_of_env
from rollout_engine.rollouts.episodes.env_processes import RemoteHost, WorkerPool
from rollout_engine.rollouts.episodes.env_threads import ThreadCalls
from rollout_engine.rollouts.episodes.factory_reference import refer_to
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers

__all__ = ["Began", "EnvCalls", "EnvFailure"]

logger = logging.getLogger(__name__)

_MAX_THREADS = 64
_MAX_END_SECONDS = 5.0
"""Most seconds to wait for `close` methods at the end."""


class EnvCalls:
    """Environments of episodes, identified by keys. Every call has exactly one result, unless it is closed first.

    A call may take `spec.step_timeout` seconds; calls of one episode run one after the other.
    """

    def __init__(self, spec: EnvSpec, on_done: Callable[[], object], kept: KeptWorkers | None = None) -> None:
        """`on_done` is called on any thread when `take` has something; it must be quick.

        `kept`: takes and gives back worker processes; None: they are new ones, and end with this object.

        Raises `RetryableError` if the system starts no thread, and `ConfigError` for an environment that processes
        cannot have.
        """
        self._spec, self._on_done, self._name = spec, on_done, name_of_env(spec)
        self._lock = threading.Lock()
        self._done: list[tuple[Episode, Any]] = []
        self._episodes: dict[int, Episode] = {}
        self._num_closing, self._all_closed = 0, threading.Condition(self._lock)
        """Episodes whose `close` has not returned."""
        self._is_ended = False
        reference = refer_to(spec) if spec.placement == "processes" else None
        self._deadlines = Deadlines(spec.step_timeout)
        self._threads = ThreadCalls(spec.num_workers or _MAX_THREADS, self._deadlines.begin, self._finish_call)
        self._workers: WorkerPool | None = None
        if reference is not None:
            kept = kept or KeptWorkers(0)
            self._workers = WorkerPool(reference, spec.num_workers, self._deadlines, self._finish_call, kept)

    def reset(self, key: int, seed: int) -> None:
        """Make the environment of a new episode and reset it; the result is a `Began`."""
        with self._lock:
            self._check_open()
            if key in self._episodes:
                raise ValueError(f"episode {key} exists: close it first")
            host: Host = EnvHost(self._spec) if self._workers is None else self._workers.host()
            episode = self._episodes[key] = Episode(key, host)
        self._submit(episode, self._place(host), "reset", partial(host.reset, seed))

    def step(self, key: int, action: Action) -> None:
        """Step an episode's environment; the result is an `Observation`."""
        episode = self._episodes[key]
        assert episode.host is not None
        self._submit(episode, self._place(episode.host), "step", partial(episode.host.step, action))

    def run(self, key: int, function: Callable[[], Any]) -> None:
        """Call a function of the rollout for an environment; the result is its return value, awaited if need be."""
        with self._lock:
            self._check_open()
            episode = self._episodes.setdefault(key, Episode(key))
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._submit(episode, self._threads, name, function, is_own=True)

    def close(self, key: int) -> None:
        """End an episode: `close` of its environment is called, and a pending result is dropped.

        Never raises, also if there is no such episode.
        """
        with self._lock:
            episode = self._episodes.pop(key, None)
            if episode is None:
                return
            episode.is_closed = True
            episode.waiting.clear()
            running = episode.running
            self._num_closing += 1
        if running is None:
            self._close_env(episode)
        else:
            running.place.cancel(running)

    def take(self) -> list[tuple[int, Any]]:
        """The results since the last call, as (key, Began, Observation, a function's return value, or EnvFailure)."""
        with self._lock:
            done, self._done = self._done, []
        return [(episode.key, result) for episode, result in done if not episode.is_closed]

    def end(self) -> None:
        """Close all episodes, and end all threads; calls still running after some seconds are left, and logged."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        for key in list(self._episodes):
            self.close(key)
        seconds = min(self._spec.step_timeout, _MAX_END_SECONDS)
        with self._all_closed:
            self._all_closed.wait_for(lambda: not self._num_closing, seconds)
        if self._workers is not None:
            self._workers.close()
        self._threads.close(seconds)
        self._deadlines.close()
        if self._num_closing:
            what = "environments did not return and were left as they are"
            logger.warning("%s: %d %s", self._name, self._num_closing, what)

    def _check_open(self) -> None:
        if self._is_ended:
            raise RuntimeError("these environments have ended")

    def _submit(
        self, episode: Episode, place: Place, method: str, work: Callable[[], Any], *, is_own: bool = False
    ) -> None:
        call = Call(episode, place, f"{self._name}: {method}", work, self._overdue, is_own=is_own)
        with self._lock:
            stuck = episode.stuck
            is_first = episode.running is None
            if not stuck and is_first:
                episode.running = call
            elif not stuck:
                episode.waiting.append(call)
        if stuck:
            self._put(episode, EnvFailure(f"{call.what}: {stuck} has still not returned."))
        elif is_first:
            place.submit(call)

    def _overdue(self, call: Call) -> None:
        failure = overdue(call)
        waiting: list[Call] = []
        with self._lock:
            if call.episode.running is call:  # it may have returned just now
                call.episode.stuck = call.what
                waiting = list(call.episode.waiting)
                call.episode.waiting.clear()
        call.place.write_off(call, failure.reason)
        self._put(call.episode, failure)
        for each in waiting:
            self._put(call.episode, EnvFailure(f"{each.what}: {call.what} has still not returned."))

    def _finish_call(self, call: Call, result: Any) -> None:
        """A call is over, in time or not; the next one of its episode may begin."""
        episode = call.episode
        is_in_time = self._deadlines.end(call)
        with self._lock:
            following = episode.waiting.popleft() if episode.waiting else None
            episode.running, episode.stuck = following, ""
            must_close = episode.is_closed and not call.is_close
        if call.is_close:
            self._finish_close(result)
        elif is_in_time:  # the watch may be late itself
            self._put(episode, overdue(call) if time.monotonic() > call.deadline else result)
        if following is not None:
            following.place.submit(following)
        elif must_close:
            self._close_env(episode)

    def _put(self, episode: Episode, result: Any) -> None:
        if episode.is_closed:
            return
        with self._lock:
            self._done.append((episode, result))
            is_first = len(self._done) == 1
        if is_first:
            self._on_done()

    def _close_env(self, episode: Episode) -> None:
        """Call `close` of an environment whose other calls have all returned."""
        host = episode.host
        if host is None or not host.has_close:
            self._finish_close(None)
            return
        place = self._place(host)
        call = Call(episode, place, f"{self._name}: close", host.close, self._overdue, is_close=True)
        episode.running = call
        place.submit(call)

    def _place(self, host: Host) -> Place:
        """Return the worker or the threads on which the calls of an environment run."""
        return host.worker if isinstance(host, RemoteHost) else self._threads

    def _finish_close(self, result: Any) -> None:
        if isinstance(result, EnvFailure):
            logger.warning("%s", result.reason)
        with self._all_closed:
            self._num_closing -= 1
            self._all_closed.notify_all()
