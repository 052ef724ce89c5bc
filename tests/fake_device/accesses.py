"""Compares each access to memory with those before it, byte by byte."""

import numpy as np

from tests.fake_device.memory import Block, Fault, Memory, View
from tests.fake_device.streams import Operation, Timeline

Where = slice | np.ndarray
"""Bytes of a block."""
_MOST_FAULTS = 100
"""One mistake is found thousands of times."""


class Accesses:
    """Notes accesses as operations run, and collects `faults`."""

    def __init__(self, memory: Memory, timeline: Timeline) -> None:
        self._memory, self._timeline = memory, timeline
        self.faults: list[Fault] = []

    def read(self, operation: Operation, block: Block, where: Where, *, must_be_set: bool = True) -> None:
        """`operation` reads those bytes."""
        self._compare(operation, "reads", block.writer[where], "writes")
        if must_be_set and not block.is_set[where].all():
            self.report("uninitialised", f"{operation} reads bytes that nobody has written")
        readers = block.readers.get(operation.stream)
        if readers is None:
            readers = block.readers[operation.stream] = np.zeros(block.capacity, np.int32)
        readers[where] = self._number(operation)

    def write(self, operation: Operation, block: Block, where: Where) -> None:
        """`operation` writes those bytes."""
        self._compare(operation, "writes", block.writer[where], "writes")
        for readers in block.readers.values():
            self._compare(operation, "writes", readers[where], "reads")
        block.writer[where] = self._number(operation)
        block.is_set[where] = True

    def hand_out(self, operation: Operation, block: Block) -> None:
        """The allocator hands out the block: what is left in it counts for nothing, and nobody may use it still."""
        every = slice(0, block.capacity)
        for numbers in (block.writer, *block.readers.values()):
            self._compare(operation, "takes memory that is still in use:", numbers, "has it", kind="reuse")
        block.writer[every] = self._number(operation)
        block.is_set[every] = False

    def check_live(self, operation: Operation, view: View) -> None:
        """Report memory that was freed, or came back elsewhere, before the operation was launched."""
        life = view.block.lives[view.generation - 1]
        if not life.start <= operation.tick < life.end and not view.block.is_of_graphs:
            self.report("stale", f"{operation} uses memory that had been freed, or has moved")

    def report(self, kind: str, text: str) -> None:
        """Note a fault, once."""
        fault = Fault(kind, text)
        if len(self.faults) < _MOST_FAULTS and fault not in self.faults:
            self.faults.append(fault)

    def _compare(self, operation: Operation, does: str, numbers: np.ndarray, did: str, kind: str = "race") -> None:
        if not numbers.size:
            return
        low, high = numbers.min(), numbers.max()
        for number in (low,) if low == high else np.unique(numbers):
            other = self._timeline.accesses[number]
            if not operation.follows(other):
                self.report(kind, f"{operation} {does} what {other} {did}, and no event or wait orders the two")

    def _number(self, operation: Operation) -> int:
        if not operation.index:
            operation.index = len(self._timeline.accesses)
            self._timeline.accesses.append(operation)
        return operation.index
