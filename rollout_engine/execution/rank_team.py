"""The other ranks of an engine, as rank 0 holds them: their processes, what it tells them, and their ends."""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollout_engine.class_names import import_path, name_elsewhere
from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError, EngineDeadError
from rollout_engine.execution.child_process import environment_with_package, start_module
from rollout_engine.execution.rank_wire import (
    CallMessage,
    Channel,
    CopyBlocks,
    Done,
    Failed,
    Forward,
    ForwardDense,
    Head,
    RankSettings,
    Started,
    StepMessage,
    rows_bytes,
    unpack_value,
)
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.ranks.exchange import TOTAL_BYTES, Exchange
from rollout_engine.model.ranks.seat import Columns, Seat
from rollout_engine.threads import start_thread
from sync.manifest import dtype_name

logger = logging.getLogger("rollout_engine")

_MODULE = "rollout_engine.execution.rank_main"
_END_SECONDS = 5.0
"""How long a rank may take to end before it is killed."""


class Rank:
    """One other rank: its process and the three sockets to it."""

    def __init__(self, settings: RankSettings, memory: int, num_ranks: int, environment: Mapping[str, str]) -> None:
        """`environment`: variables that it has besides this process's."""
        self.rank = settings.rank
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [pair[1] for pair in pairs]
        numbers = [memory, *(end.fileno() for end in theirs)]
        variables = environment_with_package() | {"OMP_NUM_THREADS": str(settings.num_threads), **environment}
        try:
            self.process = start_module(
                _MODULE, [*map(str, numbers), str(num_ranks)], descriptors=numbers, environment=variables
            )
        except BaseException:
            for pair in pairs:
                pair[0].close()
            raise
        finally:
            for end in theirs:
                end.close()
        self.life, self.steps, self.calls = (Channel(pair[0]) for pair in pairs)
        self.is_started = threading.Event()
        """Set when it has started, and when it never will."""
        try:
            self.life.send(settings)
        except OSError:
            pass  # it has ended already, which its watch sees

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def end(self) -> None:
        """End the process, and wait for it."""
        for channel in (self.steps, self.calls, self.life):
            channel.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankTeam:
    """All ranks but the first. Satisfies `model.ranks.seat.Followers`; made by rank 0, which it gives a `seat`.

    When one ends, whoever waits for it anywhere fails with `EngineDeadError`, which names it.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; each begins to load. Raises `ConfigError` where that is not possible."""
        if not turns.is_available() or not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} needs Linux and the C++ kernels, which could not "
                "be built here. Install g++, or leave it out."
            )
        self.num_ranks = config.tensor_parallel_size
        self.num_threads = config.num_threads or max(1, torch.get_num_threads() // self.num_ranks)
        self.error: Exception | None = None
        """Why the ranks compute nothing more: the first that ended or failed."""
        self._has_failed = threading.Event()
        self._on_death: Callable[[str], object] | None = None
        self._changing, self._is_closing = threading.Lock(), False
        self._calling = threading.Lock()
        memory = os.memfd_create("rollout-engine-ranks")
        self._ranks: list[Rank] = []
        try:
            os.ftruncate(memory, TOTAL_BYTES)
            self.seat = Seat(self._exchange(memory), self)
            for rank in range(1, self.num_ranks):
                settings = RankSettings(
                    *(_named_elsewhere(config), rank, self.num_threads, logger.getEffectiveLevel(), import_path()),
                    rendezvous=self._rendezvous,
                )
                self._ranks.append(Rank(settings, memory, self.num_ranks, self._environment(rank)))
                start_thread(self._watch, self._ranks[-1], name=f"rank-{rank}")
        except BaseException:
            self.shutdown()
            raise
        finally:
            os.close(memory)

    _rendezvous: str | None = None
    """Where the ranks' devices find one another."""

    def _exchange(self, memory: int) -> Exchange:
        """Rank 0's end, over a descriptor of memory."""
        return Exchange(memory, 0, self.num_ranks)

    def _environment(self, rank: int) -> Mapping[str, str]:
        """Variables of a rank's process."""
        return {}

    def _settle(self, message: CallMessage) -> None:
        """Called before ranks carry out a call: what they were told to compute before has been computed."""

    def wait_started(self) -> None:
        """Wait until all have loaded their parts. Raises what prevented it."""
        for rank in self._ranks:
            rank.is_started.wait()
        self.require_alive()

    def raise_error(self, effect: Exception | None = None) -> NoReturn:
        """Raise the error of the rank that has ended or failed, of which the caller has seen an `effect`."""
        self._has_failed.wait(_END_SECONDS)
        self.require_alive()
        seen = "" if effect is None else f" ({effect})"
        raise EngineDeadError(f"A step or call of the ranks failed, and they cannot go on{seen}: make a new engine.")

    def require_alive(self) -> None:
        """Raise where a rank has ended or failed."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def watch(self, on_death: Callable[[str], object]) -> None:
        """Call `on_death` with the reason when a rank ends or fails, at once if one has."""
        with self._changing:
            self._on_death = on_death
            error = self.error
        if error is not None:
            on_death(str(error))

    def forward(
        self, token_ids: np.ndarray, columns: Columns, logit_rows: np.ndarray, adapter_rows: AdapterRows | None
    ) -> None:
        arrays = (token_ids, columns.first_positions, columns.token_starts, columns.blocks, columns.block_starts)
        self._tell(Forward(*(array.tobytes() for array in (*arrays, logit_rows)), rows_bytes(adapter_rows)))

    def forward_dense(self, input_ids: Tensor, adapter_rows: AdapterRows | None, experts: Tensor | None) -> None:
        content = None if experts is None else experts.short().numpy().tobytes()
        shape = () if experts is None else tuple(experts.shape)
        ids = input_ids.contiguous().numpy().tobytes()
        self._tell(ForwardDense(ids, len(input_ids), rows_bytes(adapter_rows), content, shape))

    def head(self, states: Tensor) -> None:
        content = states.contiguous().view(torch.uint8).numpy().tobytes()
        self._tell(Head(content, tuple(states.shape), dtype_name(states.dtype)))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._tell(CopyBlocks(pairs))

    def ask(self, message: CallMessage, own: Callable[[], Any] = lambda: None) -> list[Any]:
        """Results of a call on every rank, rank 0's by `own`, in order. Raises the first error once all have ended."""
        with self._calling:
            try:
                self._settle(message)
                for rank in self._ranks:
                    rank.calls.send(message)
                failure: BaseException | None = None
                results: list[Any] = [None]
                try:
                    results[0] = own()
                except BaseException as error:  # the answers are to be read, whatever happens here
                    failure = error
                for rank in self._ranks:
                    answer = rank.calls.receive(Done | Failed)
                    if isinstance(answer, Failed):
                        failure = failure or answer.as_error(rank.rank, type(message).__name__)
                    else:
                        results.append(unpack_value(answer.value))
            except (EOFError, OSError):
                self.raise_error()
        if failure is not None:
            raise failure
        return results

    def fail(self, error: Exception) -> None:
        """Let no rank compute any more, because of `error`."""
        with self._changing:
            if self._is_closing or self.error is not None:
                return
            self.error, on_death = error, self._on_death
        logger.critical("%s", error)
        try:
            if on_death is not None:
                on_death(str(error))  # first: a step that fails ends its requests, and the engine would take others
        finally:
            self._has_failed.set()
            self.seat.exchange.break_()
            for rank in self._ranks:
                rank.is_started.set()

    def shutdown(self) -> None:
        """End all processes."""
        with self._changing:
            self._is_closing = True
        if hasattr(self, "seat"):
            self.seat.exchange.break_()
        for rank in self._ranks:
            rank.end()

    def _tell(self, message: StepMessage) -> None:
        try:
            for rank in self._ranks:
                rank.steps.send(message)
        except OSError:
            self.raise_error()

    def _watch(self, rank: Rank) -> None:
        """Wait for the end of a rank, on a thread of its own."""
        try:
            answer = rank.life.receive(Started | Failed)
            if isinstance(answer, Started):
                rank.is_started.set()
                answer = rank.life.receive(Failed)
            self.fail(answer.as_death(rank.rank))
        except (EOFError, OSError, msgspec.MsgspecError):
            if not self._is_closing:
                status = rank.process.wait()
                self.fail(EngineDeadError(f"{rank.name} has ended with status {status}."))


def _named_elsewhere(config: EngineConfig) -> EngineConfig:
    """The configuration with the user's extensions under names that another process finds."""
    names: Sequence[str] = config.worker_extensions
    extensions = tuple(name_elsewhere(name, "worker_extensions") for name in names)
    return msgspec.structs.replace(config, worker_extensions=extensions, logits_processors=())
