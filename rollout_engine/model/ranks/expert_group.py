"""One engine's end of a group whose engines divide the experts of a mixture: `data_parallel_size` of them.

    main thread   enter ── a step: at each mixture layer `take_part` with its rows ── leave
    own thread    rounds that others begin while this engine computes no step: the same layers without rows

    a layer       write own rows ── all meet ── compute the own experts on all engines' rows ── all meet ── read outputs

`waves` decides who takes part. Rows of a product do not depend on one another (decisions/0001), so the outputs are
those of one engine with all experts, to the bit.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.metrics import RoundStats
from rollout_engine.base.threads import start_thread
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.group_memory import MAX_ENGINES, GroupMemory, Part
from rollout_engine.model.ranks.waves import Field, Stage, Waves

_NAP = 0.0005
"""Seconds between two looks at the other engines."""
_LOOK_SECONDS = 0.5
"""How often an idle engine checks whether the others live."""
_PATIENCE = 0.1
"""Seconds that others wait for a step of this engine that is due, before it takes part without tokens."""
_LEAVE_SECONDS = 5.0
_BEGUN = MAX_ENGINES
"""The counter of the rounds that have begun."""


class RoundLayer(Protocol):
    """A mixture layer, as a round sees it."""

    dtype: torch.dtype
    """Dtype of rows."""

    def compute(self, parts: list[Part]) -> None:
        """Write the outputs of the own experts for all engines' rows."""


class ExpertGroup:
    """Takes part in rounds.

    Args:
        memory: the group's.
        rank: this engine's place in the group.
    """

    def __init__(self, memory: GroupMemory, rank: int) -> None:
        self._memory, self.rank, self.size = memory, rank, memory.size
        self.waves = Waves(memory.numbers, rank, memory.exclusive)
        self.layers: list[RoundLayer] = []
        """Mixture layers in the order in which a forward computes them."""
        self.stats = RoundStats()
        self._key, self._serves = 0, False
        self._round = self._next = 0
        """Number of the round in progress, 0 if none is, and its next layer."""
        self._turn = threading.Lock()
        """Held by the thread that may compute: during a step by that of the step."""
        self._in_step = False
        self._expects_step = False
        """Whether a step of this engine is due, so that other engines had better wait for it."""
        self._has_left = threading.Event()
        self._watched: dict[int, int] = {}
        """Descriptors of the other engines' processes, by rank."""
        self._on_broken: Callable[[str], object] = lambda reason: None
        self._thread: threading.Thread | None = None
        """The thread that serves."""
        memory.numbers[Field.PROCESS, rank] = os.getpid()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertGroup":
        """Copies of a module are of the same engine."""
        return self

    def add_layer(self, layer: RoundLayer) -> int:
        """Add a mixture layer, the next that a forward computes; returns its number."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def serve(self, key: int) -> None:
        """Take part in rounds from now on. `key`: a number for the live weights, the same in engines that have them."""
        self._key, self._serves = key, True
        self.waves.open(key)
        self._thread = start_thread(self._serve, name="expert-rounds")

    def watch(self, on_broken: Callable[[str], object]) -> None:
        """Call `on_broken`, on any thread, with the reason when another engine of the group has ended."""
        self._on_broken = on_broken

    def enter(self, seconds: float) -> bool:
        """Begin a step: until `leave` this thread may compute. False if the group is not ready within `seconds`."""
        start = time.monotonic()
        self.waves.set_work(True)
        while not (is_held := self.waves.try_hold()) and time.monotonic() < start + seconds:
            self._check_others()
            time.sleep(_NAP)
        if is_held:
            self._turn.acquire()
            self._in_step = True
        self.stats.wait_seconds += time.monotonic() - start
        return is_held

    def leave(self, *, keeps: bool, expects: bool) -> None:
        """End a step. `keeps`: other engines keep their weights until the next one; `expects`: it follows at once."""
        try:
            self._finish()
        finally:  # a group that is broken ends too, and its thread waits for the turn
            if self._in_step:  # else it has closed
                self._in_step, self._expects_step = False, expects
                if not keeps:
                    self.waves.release()
                self._turn.release()
        self.waves.set_work(expects)

    def rest(self) -> None:
        """Note that no step is due: there is nothing to compute."""
        self._expects_step = False
        self.waves.set_work(False)

    def take_part(self, layer: int, rows: Tensor, experts: Tensor) -> Tensor:
        """The outputs [T * k, H] of `experts` int64 [T, k] for `rows` [T, H], at a mixture layer of a forward.

        Raises `LifecycleError` outside of a step, and `BrokenTurnsError` if another engine has ended. Before `serve`,
        in trials of the rows of a forward, this engine computes alone, and the outputs of other engines' experts are 0.
        """
        if not self._serves:
            outputs = rows.new_zeros(experts.numel(), rows.shape[1])
            self.layers[layer].compute([Part(rows, experts, outputs)])
            return outputs
        if not self._in_step:
            what = f"the experts are divided over {self.size} engines, which compute together, step by step"
            raise LifecycleError(f"A forward outside of a step is not possible with data_parallel_size: {what}.")
        if layer == 0:
            self._finish()
            self._round = self.waves.begin_round()
            self.stats.num_rounds += 1
            if self._round > self._memory.phases.read(_BEGUN):
                self._memory.phases.announce(_BEGUN, self._round)
        elif not self._round or layer != self._next:
            raise AssertionError(f"layer {layer} of the experts is computed behind layer {self._next - 1}")
        return self._pass_layer(layer, rows, experts)

    def close(self, *, politely: bool = False) -> None:
        """Have this engine's experts used no more, until `open`. Returns once they are not.

        `politely`: only when no other engine has requests to compute, unless it closes as well. The others compute
        nothing meanwhile. Any thread may call it, also inside a step, behind its forward.
        """
        self._finish()
        self._expects_step = False
        if self._in_step:
            self._in_step = False
            self.waves.release()
            self._turn.release()
        self.waves.set_work(False)
        if politely:
            self.waves.release()
        else:
            self.waves.ask_to_close()
        while not self.waves.try_close(politely=politely):
            self._check_others()
            time.sleep(_NAP)
        with self._turn:  # the own thread may be at the end of a round
            pass

    def open(self, key: int | None = None) -> None:
        """Have the experts used again, with the weights that `key` stands for; None: those from before."""
        self._key = self._key if key is None else key
        self.waves.open(self._key)

    @property
    def is_closed(self) -> bool:
        """Whether the experts are not used."""
        return bool(self._memory.numbers[Field.STAGE, self.rank] != Stage.OPEN)

    def end(self) -> None:
        """Leave the group, for good, in order: the others are not broken by it while they have nothing to compute."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        self._finish()
        self.waves.ask_to_close()
        while not self.waves.try_close() and time.monotonic() < deadline:
            time.sleep(_NAP)
        self.waves.leave()
        self._has_left.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_SECONDS)

    def _pass_layer(self, layer: int, rows: Tensor, experts: Tensor) -> Tensor:
        phase = (self._round - 1) * len(self.layers) + layer
        memory, of = self._memory, self.layers[layer]
        memory.write(self.rank, phase, self._key, rows.detach(), experts)
        self._meet(2 * phase + 1)
        self._check_headers(phase)
        parts = [part for rank in range(self.size) if (part := memory.read(rank, of.dtype)) is not None]
        try:
            of.compute(parts)
        except BaseException as problem:
            memory.numbers[Field.BROKEN, self.rank] = 1
            self._fail(f"its own experts could not be computed ({type(problem).__name__}: {problem})")
        self._meet(2 * phase + 2)
        found = memory.read(self.rank, of.dtype)
        outputs = rows.new_empty(0) if found is None else found.outputs.clone()
        self._next = layer + 1
        if self._next == len(self.layers):
            self._round = self._next = 0
        return outputs

    def _finish(self) -> None:
        """Take part without rows in the rest of a round that a forward of this engine has not ended."""
        while self._round and self._in_step:
            self._pass_dummy()

    def _pass_dummy(self) -> None:
        dtype = self.layers[self._next].dtype
        self._pass_layer(self._next, torch.empty(0, 0, dtype=dtype), torch.empty(0, 0, dtype=torch.int64))

    def _meet(self, phase: int) -> None:
        """Note the end of a phase, and wait until all engines have reached it."""
        start = time.monotonic()
        self._memory.phases.raise_to(self.rank, phase)
        while not self._memory.phases.wait(self.size, phase):
            self._check_others()
        if self._in_step:
            self.stats.wait_seconds += time.monotonic() - start

    def _check_headers(self, phase: int) -> None:
        """Have rows meet experts of the same weights, at the same layer of the same round."""
        for rank in range(self.size):
            found = self._memory.read_header(rank)
            if (found.phase, found.key) != (phase, self._key):
                self._memory.numbers[Field.BROKEN, self.rank] = 1
                what = f"engine {rank} came with (layer, weights) {found[:2]}, expected {(phase, self._key)}"
                self._fail(f"the engines do not compute the same step: {what}")

    def _serve(self) -> None:
        """Take part in the rounds that other engines begin while this one computes no step."""
        numbers = self._memory.numbers
        with torch.inference_mode():
            while not self._has_left.is_set():
                try:
                    if self._memory.phases.sleep(_BEGUN, int(numbers[Field.JOINED, self.rank]), _LOOK_SECONDS):
                        self._pay()
                    self._check_others()
                except BrokenTurnsError:
                    return

    def _pay(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self._expects_step and time.monotonic() < deadline:
            if not self.waves.owes:
                return
            time.sleep(_NAP)
        self._expects_step = False
        with self._turn:
            self._round = self.waves.join_owed()
            self.stats.num_dummies += bool(self._round)
            while self._round:
                self._pass_dummy()

    def _check_others(self) -> None:
        """Raise `BrokenTurnsError`, behind the call of `on_broken`, if another engine has ended."""
        numbers = self._memory.numbers
        for rank in range(self.size):
            has_left = numbers[Field.STAGE, rank] == Stage.LEFT
            is_needed = bool(self._round or numbers[Field.WORK, self.rank])
            if rank == self.rank or (has_left and not is_needed):
                continue
            process = int(numbers[Field.PROCESS, rank])
            if numbers[Field.BROKEN, rank] or has_left or (process and self._has_ended(rank)):
                self._fail(f"engine {rank} of the {self.size} that divide the experts (process {process}) has ended")
        if numbers[Field.BROKEN, self.rank]:
            self._fail("its group of engines that divide the experts was given up")

    def _has_ended(self, rank: int) -> bool:
        process = int(self._memory.numbers[Field.PROCESS, rank])
        if process == os.getpid():
            return False
        try:
            if rank not in self._watched:
                self._watched[rank] = os.pidfd_open(process)
        except OSError:
            return True
        return bool(select.select([self._watched[rank]], [], [], 0)[0])

    def _fail(self, reason: str) -> None:
        if not self._has_left.is_set():
            self._on_broken(f"engine {self.rank} (data_parallel_size={self.size}) ends: {reason}")
        raise BrokenTurnsError(reason)
