"""Runs environments in worker processes. A process that hangs or dies is replaced.

The episode whose call was running fails. Every other one of that process is played again in the new one at its next
call, from its seed and its actions, and continues if it is as it was; only its random state and time could differ.
"""

import hashlib
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from envs_adapters.base import Action, Observation
from rollout_engine.base.threads import run_together
from rollout_engine.rollouts.episodes.env_call import Call
from rollout_engine.rollouts.episodes.env_deadlines import Deadlines
from rollout_engine.rollouts.episodes.env_host import Began, EnvFailure, one_line
from rollout_engine.rollouts.episodes.env_threads import ThreadCalls
from rollout_engine.rollouts.episodes.env_wire import Close, Order, Reply, Reset, Step
from rollout_engine.rollouts.episodes.factory_reference import FactoryReference
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers, start_of
from rollout_engine.rollouts.episodes.worker_process import WorkerLostError, WorkerProcess

_START_SECONDS = 60.0
"""Seconds for the start of a process and the import of the factory, if `step_timeout` is less."""
_END_SECONDS = 5.0
_TRIES = 3
"""Attempts to send an order: processes may die before they read it."""


class WorkerCalls(ThreadCalls):
    """One worker: a process, and the thread here that talks with it. Both are made when they are needed.

    The process may have been kept by an earlier worker, and is kept for a later one.
    """

    def __init__(
        self,
        reference: FactoryReference,
        deadlines: Deadlines,
        returned: Callable[[Call, Any], object],
        kept: KeptWorkers,
    ) -> None:
        super().__init__(1, self._begin, returned)
        self.name = reference.name or reference.factory
        self.num_episodes = 0
        self.generation = 0
        """Number of processes it has had."""
        self._reference, self._deadlines, self._kept = reference, deadlines, kept
        self._process: WorkerProcess | None = None
        self._start = b""
        """The digest of the process's start, from `start_of`."""
        self._call: Call | None = None
        self._is_ended = False
        self._problem = ""
        """Why the factory cannot be imported."""

    def process(self) -> WorkerProcess:
        """The process, a kept or new one if there is none; on the worker's thread.

        Raises `WorkerLostError` for one that dies at once or cannot import the factory, and once the worker has ended;
        `RetryableError` if there can be no process.
        """
        if self._problem:
            raise WorkerLostError(f"cannot make it: {self._problem}")
        if self._process is not None and self._process.is_alive:
            return self._process
        if self._process is not None:
            self._process.end()
        self.extend("the start of its worker process", _START_SECONDS)
        self._start = start_of(self._reference)
        process = self._kept_process() or self._new_process()
        self.extend("")
        return process

    def extend(self, phase: str, seconds: float = 0.0) -> None:
        """Start the clock of the running call again, for a phase of it.

        Raises `WorkerLostError` if it is overdue.
        """
        assert self._call is not None
        self._call.phase = phase
        if not self._deadlines.extend(self._call, seconds):
            raise WorkerLostError("was too slow")

    def live_process(self, generation: int) -> WorkerProcess | None:
        """The process of this number, while it lives."""
        is_it = self._process is not None and self.generation == generation and self._process.is_alive
        return self._process if is_it else None

    def write_off(self, call: Call, message: str) -> None:
        """Kill the process that a call is in, unless it has returned: others may use the process by now."""
        with self._lock:
            if call.is_on_thread and self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """End thread and process, or keep the process; a call that has not returned is lost."""
        with self._lock:
            self._is_ended = True
            process, is_busy = self._process, self._load > 0
        if process is not None and is_busy:
            process.kill()
        self.close(_END_SECONDS)
        if process is not None and not self.num_episodes and not self._problem:
            self._kept.give(self._start, process)
        elif process is not None:
            process.end()

    def count(self, number: int) -> None:
        """Count `number` more episodes."""
        with self._lock:
            self.num_episodes += number

    def _kept_process(self) -> WorkerProcess | None:
        """One that has loaded the factory for an earlier rollout, and is as a new one would be."""
        while (process := self._kept.take(self._start)) is not None:
            self._adopt(process)
            with suppress(WorkerLostError):  # it may have ended itself just now
                if not process.reuse():
                    return process
            process.end()
            self.extend("the start of its worker process", _START_SECONDS)
        return None

    def _new_process(self) -> WorkerProcess:
        process = self._adopt(WorkerProcess())
        self._problem = process.load(self._reference)
        if self._problem:
            raise WorkerLostError(f"cannot make it: {self._problem}")
        return process

    def _adopt(self, process: WorkerProcess) -> WorkerProcess:
        """Make it the worker's own. Raises `WorkerLostError`, and ends it, if the worker has ended meanwhile."""
        with self._lock:
            if not self._is_ended:
                self._process = process
                self.generation += 1
                return process
        process.kill()
        process.end()
        raise WorkerLostError("has ended with all others")

    def _begin(self, call: Call) -> None:
        self._call = call
        self._deadlines.begin(call)


class RemoteHost:
    """The environment of one episode in a worker's process. Its methods block, on the worker's thread."""

    is_async = False
    has_close = True

    def __init__(self, worker: WorkerCalls, number: int) -> None:
        self.worker, self._number = worker, number
        self._played: list[tuple[Order, bytes]] = []
        """Orders so far, with digests of their replies."""
        self._generation = 0
        """The process that it is in."""
        self._lost = ""
        """Why the episode cannot continue."""

    def reset(self, seed: int) -> Began | EnvFailure:
        """Do `EnvHost.reset`; a failure is returned as an `EnvFailure`."""
        reply = self._play(Reset(self._number, seed), "reset")
        return reply.began or EnvFailure(reply.failure)

    def step(self, action: Action) -> Observation | EnvFailure:
        """Do `EnvHost.step`; a failure is returned as an `EnvFailure`."""
        reply = self._play(Step(self._number, action), "step")
        return reply.observation or EnvFailure(reply.failure)

    def close(self) -> EnvFailure | None:
        """Close the environment, unless its process is gone."""
        self.worker.count(-1)
        process = self.worker.live_process(self._generation)
        try:
            reply = Reply() if process is None else process.carry_out(Close(self._number))
        except WorkerLostError as problem:
            reply = Reply(failure=self._reason("close", str(problem)))
        return EnvFailure(reply.failure) if reply.failure else None

    def _play(self, order: Order, method: str) -> Reply:
        if self._lost:
            return Reply(failure=f"{self.worker.name}: {method}: the episode is lost: {self._lost}")
        for tries_left in reversed(range(_TRIES)):
            try:
                reply = self._process().carry_out(order)
                break
            except WorkerLostError as problem:
                if problem.has_begun or not tries_left:
                    self._lost = self._reason(method, str(problem))
                    return Reply(failure=self._lost)
        self._played.append((order, digest_of_reply(reply)))
        return reply

    def _process(self) -> WorkerProcess:
        """The worker's process, with the episode in it as it was."""
        process = self.worker.process()
        if self._generation != self.worker.generation:
            self._play_again(process)
        self._generation = self.worker.generation
        return process

    def _play_again(self, process: WorkerProcess) -> None:
        """Play the episode again in a new process. Raises `WorkerLostError` if it differs."""
        for number, (order, digest) in enumerate(self._played):
            self.worker.extend("playing the episode again in a new process")
            reply = process.carry_out(order)
            if digest_of_reply(reply) != digest:
                place = f"its step {number}" if number else "its reset"
                what = f"was replaced; played again in a new one, the episode was another one from {place} on"
                why = reply.failure or "the environment is not determined by its seed and actions"
                raise WorkerLostError(f"{what}: {why}")
        self.worker.extend("")

    def _reason(self, method: str, how: str) -> str:
        return one_line(f"{self.worker.name}: {method}: its worker process {how}.")


class WorkerPool:
    """At most `num_workers` workers (None: one for each processor), among which episodes are divided."""

    def __init__(
        self,
        reference: FactoryReference,
        num_workers: int | None,
        deadlines: Deadlines,
        returned: Callable[[Call, Any], object],
        kept: KeptWorkers,
    ) -> None:
        self._make: Callable[[], WorkerCalls] = partial(WorkerCalls, reference, deadlines, returned, kept)
        self._num_workers = num_workers or len(os.sched_getaffinity(0))
        self._workers: list[WorkerCalls] = []
        self._numbers = itertools.count()

    def host(self) -> RemoteHost:
        """The host of a new episode, in the worker that has the fewest."""
        worker = min(self._workers, key=lambda each: each.num_episodes, default=None)
        if worker is None or (worker.num_episodes and len(self._workers) < self._num_workers):
            self._workers.append(worker := self._make())
        worker.count(1)
        return RemoteHost(worker, next(self._numbers))

    def close(self) -> None:
        """End all workers; their processes may be kept."""
        run_together([worker.end for worker in self._workers], name="end of environments")


def digest_of_reply(reply: Reply) -> bytes:
    """Digest of a reply except its `info`, which may hold times."""
    observation = reply.observation if reply.began is None else reply.began.observation
    seen: list[Any] = [reply.failure]
    if observation is not None:
        seen += [observation.messages, sorted(observation.reward.items())]  # type: ignore[union-attr]
        seen += [observation.terminated, observation.truncated, observation.seat]
    if reply.began is not None:
        seen += [reply.began.tools, reply.began.num_seats]
    return hashlib.blake2b(msgspec.msgpack.encode(seen), digest_size=16).digest()
