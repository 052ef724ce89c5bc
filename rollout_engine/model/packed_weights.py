"""The packed copies that a module's linears run from, all replaced at once.

    pack(place) ──> swap()      new copies beside those in use, while steps go on; at a boundary the two change places,
                                and the next update packs over what was in use

Where our own kernel multiplies, no forward reads a linear's plain weight: that is where the next weights are gathered,
and until `swap` the old ones are still to be had from the packed copies (`restore`).
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.experts import RowInvariantExperts, RowInvariantRouter
from rollout_engine.model.fusion import LinearGroup, RowInvariantLinear, linear_groups


class PackedWeights:
    """Of a module after `make_row_invariant`, with plans proven. Without groups every call is a no-op.

    Its linears no longer look whether a weight was written: what they run from changes by `swap` alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._groups = linear_groups(module)
        self._own = [group for group in self._groups if group.plan.kernel == linear.OWN]
        self._room: list[Tensor] = []
        """Panels for the next copies of `_own`; none before the first update."""
        self._next: list[tuple[linear.Operand, Tensor | None]] = []
        """Operand and bias of every group."""
        read = {_storage(tensor) for tensor in _read_in_place(module)}
        packed = {_storage(child.weight): group in self._own for group in self._groups for child in group.children}
        self._unread = {storage for storage, by_our_kernel in packed.items() if by_our_kernel} - read
        self.make()
        for group in self._groups:
            group.follows_writes = False

    def make(self) -> None:
        """Run from copies of the weights as they are: at the start, and after `release`."""
        self.pack(lambda weight: weight)
        self.swap()

    def release(self) -> None:
        """Free all copies; nothing may run until `make` or an update."""
        for group in self._groups:
            group.unpack()
        self._room, self._next = [], []

    def reads(self, tensor: Tensor) -> bool:
        """Whether a forward reads the storage of `tensor` where it lies."""
        return _storage(tensor) not in self._unread

    def pack(self, place: Callable[[Tensor], Tensor]) -> None:
        """Make the next copies; `place(parameter)` is where its new values are. Those in use are not touched."""
        if self._own and not self._room:
            self._room = gemm.empty_panels([group.weight() for group in self._own])
        panels = dict(zip(self._own, self._room, strict=True))
        self._next = [
            (_next_operand(group, place, panels.get(group)), group.stacked_bias(place)) for group in self._groups
        ]

    def swap(self) -> None:
        """Run from the next copies, and make the old ones room for those after."""
        before = [group.packed for group in self._own]
        self._room = [copy.panels for copy in before if copy is not None]
        for group, (operand, bias) in zip(self._groups, self._next, strict=True):
            group.install(operand, bias)
        self._next = []

    def surrender(self) -> None:
        """Give up the copies in use, to be packed over; nothing may run until `swap`."""
        before = [group.packed for group in self._own]
        self._room = [copy.panels for copy in before if copy is not None]
        for group in self._groups:
            group.unpack()

    @property
    def num_spare_bytes(self) -> int:
        """Bytes of room for the next copies, beside those in use."""
        return sum(panels.nbytes for panels in self._room)

    @property
    def num_bytes_to_spare(self) -> int:
        """Bytes that `pack` will take for it."""
        in_use = (group.packed for group in self._own)
        return 0 if self._room else sum(copy.panels.nbytes for copy in in_use if copy is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Of our own kernel: all copies, and room for copies, that exist now."""
        operands = [*(group.packed for group in self._own), *(operand for operand, _ in self._next)]
        yield from (operand.panels for operand in operands if isinstance(operand, gemm.PackedWeight))
        yield from self._room

    def restore(self) -> None:
        """Write the values of the copies in use, if there are any, to the plain weights that no forward reads."""
        for group in self._own:
            if group.packed is None:
                continue
            values = gemm.unpack(group.packed, group.weight())
            for child, rows in zip(group.children, values.split([len(c.weight) for c in group.children]), strict=True):
                if not self.reads(child.weight):
                    child.weight.detach().copy_(rows)


def _next_operand(group: LinearGroup, place: Callable[[Tensor], Tensor], panels: Tensor | None) -> linear.Operand:
    """A plan that multiplies by the plain weight goes on doing so: it will have changed in place."""
    weight = group.weight() if group.plan.kernel == linear.LIBRARY else group.weight(place)
    return linear.pack(weight, group.plan, panels)


def _read_in_place(module: nn.Module) -> Iterator[Tensor]:
    """Everything but the matrices that linears, routers and experts hold."""
    for child in module.modules():
        multiplies = isinstance(child, RowInvariantLinear | RowInvariantRouter | RowInvariantExperts)
        yield from (p for p in child.parameters(recurse=False) if not (multiplies and p.dim() > 1))
        yield from child.buffers(recurse=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
