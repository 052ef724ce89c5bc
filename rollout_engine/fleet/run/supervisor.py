"""Starts, updates and ends the replicas of a fleet, each on a thread of its own: all of it takes time."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RetryableError
from rollout_engine.base.threads import start, start_thread
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.provider import Provider
from rollout_engine.fleet.run.updates import FleetUpdates

_ORDERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "pause_generation": ("pause_generation", dict(mode="keep", clear_cache=False, wait_for_inflight_requests=None)),
    "resume_generation": ("pause_generation", None),
    "sleep": ("sleep", dict(level=1, mode="abort")),
    "wake_up": ("sleep", None),
}
"""Verb -> the call that puts a replica which starts later into the same state, with its arguments; None: none does."""


_ANSWER_SECONDS = 5.0


class Fleet(Protocol):
    """Callbacks for the results of starts and catch-ups."""

    def add_replica(self, member: Member, is_current: Callable[[], bool]) -> bool:
        """Add a replica that has an engine. False, nothing done: the others' state has changed (not `is_current`)."""
        ...

    def not_started(self, index: int, problem: Exception) -> None:
        """Note that a replica did not start."""

    def lags(self, member: Member) -> bool:
        """Whether a replica still has to catch up: an update may have overtaken it."""
        ...

    def caught_up(self, member: Member, version: int) -> None:
        """Note that a replica has got weights of this version."""

    def not_caught_up(self, member: Member, problem: Exception) -> None:
        """Note that a replica did not get the newest weights."""


class Supervisor:
    """The threads of a fleet. Its methods are called inside the fleet's lock, and return at once."""

    def __init__(self, provider: Provider, config: EngineConfig, updates: FleetUpdates) -> None:
        self._provider, self._config, self._updates = provider, config, updates
        self._orders: dict[str, dict[str, Any]] = {}
        """Calls that a replica which starts later gets first. Replaced, never changed."""
        self._closing = threading.Event()
        self._threads: dict[threading.Thread, None] = {}
        """Threads that have not ended, oldest first."""
        self._without_thread: queue.SimpleQueue[Member | None] = queue.SimpleQueue()
        """Replicas to end for which no thread could be started; None: no more will follow."""
        self._last_resort = start_thread(self._end_without_thread, name="end-replicas")

    @property
    def is_closed(self) -> bool:
        """Whether nothing starts any more."""
        return self._closing.is_set()

    def check(self, num_more: int, num_present: int) -> None:
        """Raise `ConfigError` if there is no room for `num_more` replicas in addition to `num_present`."""
        self._provider.check(num_more, self._config, num_present)

    def note_order(self, verb: str, arguments: Mapping[str, Any]) -> Callable[[], None]:
        """Remember the state that a call puts the replicas into; the function returned undoes that."""
        if verb not in _ORDERS:
            return lambda: None
        name, order = _ORDERS[verb]
        before, orders = self._orders, {key: value for key, value in self._orders.items() if key != name}
        if order is not None:
            orders[name] = {key: arguments.get(key, value) for key, value in order.items()}
        self._orders = orders

        def take_back() -> None:
            if self._orders is orders:
                self._orders = before

        return take_back

    def start(self, index: int, at: float, fleet: Fleet) -> None:
        """Start a replica at the time `at`."""
        try:
            self._run(f"start-replica-{index}", at, lambda: self._start(index, fleet))
        except RetryableError as problem:
            fleet.not_started(index, problem)

    def catch_up(self, member: Member, at: float, fleet: Fleet) -> None:
        """Give a replica the newest weights at the time `at`."""
        try:
            self._run(f"update-replica-{member.index}", at, lambda: self._catch_up(member, fleet))
        except RetryableError as problem:
            fleet.not_caught_up(member, problem)

    def bring_draft(self, member: Member) -> None:
        """Give a replica the draft model's newest weights, while it serves; at the next update if not now."""
        with suppress(RetryableError):  # no thread
            self._run(f"draft-replica-{member.index}", 0.0, lambda: self._updates.give_draft(member))

    def retire(self, member: Member, *, answers_first: bool = False) -> None:
        """End a replica's engine. `answers_first`: after it has answered the calls that it got."""
        if answers_first:
            with suppress(RetryableError):  # no thread: they are lost
                return self._spawn(f"end-replica-{member.index}", partial(_end_answered, member))
        self._end(member)

    def close(self) -> None:
        """Begin no more work."""
        self._closing.set()

    def end(self, members: Iterable[Member]) -> None:
        """End these replicas, and wait for every thread. Called without the lock, after `close`."""
        for member in members:
            self._end(member)
        self._provider.close()
        self._without_thread.put(None)
        for thread in [*self._threads, self._last_resort]:
            thread.join()
        self._provider.shutdown()

    def _start(self, index: int, fleet: Fleet) -> None:
        try:
            member = Member.start(index, self._provider, self._config)
        except Exception as problem:
            if not self.is_closed:
                fleet.not_started(index, problem)
            return
        try:
            self._bring_in(member, fleet)
        except Exception as problem:
            member.replica.end(kill=True)
            fleet.not_started(index, problem)

    def _bring_in(self, member: Member, fleet: Fleet) -> None:
        """Put a new replica into the state of the others, as often as that changes meanwhile, and hand it over."""
        while not self.is_closed:
            orders = self._orders
            for name, arguments in orders.items():
                member.client.call(name, arguments).result()
            if fleet.add_replica(member, lambda orders=orders: self._orders is orders):  # type: ignore[misc]
                return
            for name, arguments in (("wake_up", dict(tags=None)), ("resume_generation", {})):
                member.client.call(name, arguments).result()
        member.replica.end()

    def _catch_up(self, member: Member, fleet: Fleet) -> None:
        with member.updating:  # until the result is noted: that of the next update is noted later
            if not fleet.lags(member):
                return
            try:
                version = self._updates.catch_up(member)
            except Exception as problem:
                fleet.not_caught_up(member, problem)
            else:
                fleet.caught_up(member, version)

    def _run(self, name: str, at: float, work: Callable[[], object]) -> None:
        def run() -> None:
            if not self._closing.wait(max(at - time.monotonic(), 0.0)):
                work()

        self._spawn(name, run)

    def _spawn(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.pop(threading.current_thread(), None)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads[thread] = None
        try:
            start(thread)
        except RetryableError:
            self._threads.pop(thread, None)
            raise

    def _end(self, member: Member) -> None:
        try:
            self._spawn(f"end-replica-{member.index}", member.replica.end)
        except RetryableError:  # not on this one: it may hold the lock that the replica's own thread waits for
            self._without_thread.put(member)

    def _end_without_thread(self) -> None:
        while (member := self._without_thread.get()) is not None:
            member.replica.end()


def _end_answered(member: Member) -> None:
    with suppress(Exception):  # a call is answered after those before it
        member.client.call("is_paused", {"timeout": None}).result(_ANSWER_SECONDS)
    member.replica.end()


@contextmanager
def start_replicas(
    provider: Provider, config: EngineConfig, count: int, meanwhile: Callable[[], object]
) -> Iterator[tuple[EngineConfig, list[Member]]]:
    """Start `count` replicas at once; yields the configuration of each, and the replicas.

    If there is no room, one fails, or the block does, nothing is left of any, nor of the provider.
    """
    members: dict[int, Member] = {}
    problems: list[Exception] = []

    def start(index: int) -> None:
        try:
            members[index] = Member.start(index, provider, config)
        except Exception as problem:
            problems.append(problem)

    threads = []
    try:
        config = provider.share(config, count)
        provider.check(count, config)
        try:
            threads += [start_thread(start, index, name=f"start-replica-{index}") for index in range(count)]
            meanwhile()
        finally:
            for thread in threads:
                thread.join()
        if problems:
            raise problems[0]
        yield config, [members[index] for index in range(count)]
    except BaseException:
        for member in members.values():
            member.replica.end(kill=True)
        provider.shutdown()
        raise
