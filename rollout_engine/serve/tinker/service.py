"""Tinker's protocol over one engine: clients, their queued requests, and the thread that trains."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.lora_training import LoraTrainer
from rollout_engine.base.threads import start_thread
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.tinker.checkpoints import Checkpoints
from rollout_engine.serve.tinker.clients import Client, Clients, Sampler
from rollout_engine.serve.tinker.futures import Futures, Pending

_OFF = "This server does not speak Tinker's protocol: start it with --tinker DIRECTORY."
_NO_TRAINER = "This server samples and does not train: start it with 'rollout-engine serve --tinker', which does."


class TinkerService:
    """The state of one server, on its event loop; work in the trainer runs on one thread, in the order of arrival."""

    def __init__(self, options: ServeOptions, trainer: LoraTrainer | None = None) -> None:
        """Raises `ConfigError` for a trainer without a directory for its checkpoints."""
        if trainer is not None and options.tinker is None:
            raise ConfigError(
                "A trainer was given without tinker='DIRECTORY', the place of its checkpoints: give both."
            )
        self._trainer = trainer
        self.checkpoints = Checkpoints(Path(options.tinker or "."))
        self.clients = Clients(options.tinker_clients, options.tinker_idle_seconds)
        self.futures = Futures(options.tinker_waiting)
        self.adding = threading.Lock()
        """Held from the load of an adapter until the request that names it is queued."""
        self._is_on = options.tinker is not None
        self._jobs: queue.SimpleQueue[tuple[Pending | None, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sweep_at = 0.0

    def require_on(self) -> "TinkerService":
        """This service, without sessions that ended. Raises `HttpProblem` 404 if the server was started without it."""
        if not self._is_on:
            raise HttpProblem(404, _OFF)
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + 1.0
            for client in self.clients.idle():
                self.end(client.id)
        return self

    @property
    def trainer(self) -> LoraTrainer:
        """The trainer. Raises `RequestError` without one."""
        if self._trainer is None:
            raise RequestError(_NO_TRAINER)
        return self._trainer

    @property
    def can_train(self) -> bool:
        """Whether there is a trainer."""
        return self._trainer is not None

    def queue(self, client: Client, request_id: str, work: Callable[[], Any]) -> Pending:
        """Queue work for the trainer's thread. A request that was queued before is not queued again."""
        pending = self.futures.find(request_id)
        if pending is None:
            pending = self.futures.add(client.id, request_id)
            self._send(pending, work)
        return pending

    def end(self, client_id: str) -> None:
        """End a client's session: its requests stop, and its adapter is freed."""
        client = self.clients.remove(client_id)
        if client is not None:
            self.futures.drop_client(client_id)
            self.unload(client)

    def unload(self, client: Client) -> None:
        """Free the adapter that a client trains, and its unnamed snapshots."""
        model, client.model = client.model, None
        if model is None:
            return

        def free() -> None:
            self.trainer.remove(model.id)
            while model.snapshots:
                self.drop_snapshot(model.snapshots.pop())
            while model.inflight:
                self.checkpoints.delete(model.inflight.pop().path)

        self._send(None, free)

    def drop_snapshot(self, sampler: Sampler) -> None:
        """Delete the snapshot of a sampler."""
        gone, sampler.checkpoint = sampler.checkpoint, None
        if gone is not None:
            self.checkpoints.delete(gone.path)

    def close(self) -> None:
        """End the trainer's thread behind the work that it has begun."""
        if self._thread is not None:
            self._jobs.put(None)

    def _send(self, pending: Pending | None, work: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = start_thread(self._work, name="tinker trainer")
        self._jobs.put((pending, work))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            pending, work = job
            try:
                result = work()
            except BaseException as problem:
                if pending is not None:
                    pending.outcome.set_result((None, problem))
            else:
                if pending is not None:
                    pending.outcome.set_result((result, None))
            del job, pending, work
