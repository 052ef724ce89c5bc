"""The packed copies that a module's linears run from, all replaced at once.

    staging(name) ... ──> pack(place) ──> swap()      the next values are gathered and packed beside the copies in use,
                                                      while steps go on; at a boundary the two change places

Where our own kernel multiplies, and nothing else reads the weight (`weight_reads`), the copy in use is the only one:
after `take_over` the module's parameter is on meta. Memory for the next copies is there during an update;
between updates it is kept while it is small.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from rollout_engine.errors import LifecycleError
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.kernels.memory import give_back
from rollout_engine.model.experts import RowInvariantExperts, RowInvariantRouter
from rollout_engine.model.fusion import LinearGroup, RowInvariantLinear, linear_groups
from rollout_engine.model.packed_embedding import PackedEmbedding, read_from_head
from rollout_engine.model.stacks import Place, stacks_of
from rollout_engine.model.weight_reads import storages_read

_KEPT_BYTES = 256 << 20
"""Fresh pages for the next copies cost an update up to a second per gigabyte."""


class PackedWeights:
    """Of a module after `make_row_invariant`, with plans proven. Without groups every call is a no-op.

    Its linears no longer look whether a weight was written: what they run from changes by `swap` alone.
    """

    def __init__(self, module: nn.Module) -> None:
        groups = linear_groups(module)
        own = [group for group in groups if group.plan.kernel == linear.OWN]
        _tie_embeddings(module, own)
        self._module = module
        read = storages_read(module) if own else set()
        self._stacks = stacks_of(own, {_storage(tensor) for tensor in _read_in_place(module)} | read)
        """By the address of the plain storage; none after `take_over`."""
        self._held = [group for stack in self._stacks.values() for group in stack.groups]
        """Those that exist packed alone."""
        self._likes = [stack.like for stack in self._stacks.values() for _ in stack.groups]
        held = {id(group) for group in self._held}
        self._others = [group for group in groups if id(group) not in held]
        self._live: list[Tensor] = []
        """Panels of `_held`, one piece of memory; none when asleep without values."""
        self._room: list[Tensor] = []
        """Of the next ones."""
        self._next: list[tuple[linear.Operand, Tensor | None]] = []
        """Operand and bias of `_held`, then of `_others`."""
        self._places: dict[str, Place] = {}
        """By accepted name."""
        self._parameters: list[tuple[nn.Module, str, Place]] = []
        """Module, attribute and place of those on meta."""
        if self._held:
            self._live = gemm.empty_panels(self._likes)
            for group, panels in zip(self._held, self._live, strict=True):
                group.install(gemm.pack(group.weight(), panels), group.stacked_bias())
        self.make()
        for group in groups:
            group.follows_writes = False

    def take_over(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Let go of the plain values of what is held packed; call it once, when nothing will read them any more.

        Returns `targets`, names and views of plain storage, with meta tensors for those `holds` is true of.
        """
        for name, view in targets.items():
            if stack := self._stacks.get(_storage(view)):
                self._places[name] = stack.place(view)
        self._put_on_meta()
        self._stacks = {}
        return {name: view.to("meta") if name in self._places else view for name, view in targets.items()}

    def holds(self, name: str) -> bool:
        """Whether the values of `name` exist packed alone."""
        return name in self._places

    def plain(self, name: str) -> Tensor:
        """A copy of the values in use of a name that is held. Raises `LifecycleError` when they were released."""
        if not self._live:
            raise LifecycleError(f"'{name}' has no values now: weights were released. Send a complete update.")
        return self._copy(self._places[name])

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Within, the module's parameters have values: copies of those in use, and writing to them changes nothing."""
        stand_ins = [(child, name, child.get_parameter(name)) for child, name, _ in self._parameters]
        copies: dict[int, nn.Parameter] = {}
        try:
            for child, name, place in self._parameters:
                key = id(child.get_parameter(name))
                if key not in copies:
                    copies[key] = nn.Parameter(self._copy(place), requires_grad=False)
                child.register_parameter(name, copies[key])
            yield
        finally:
            for child, name, stand_in in stand_ins:
                child.register_parameter(name, stand_in)

    def staging(self, name: str) -> Tensor:
        """Where the next values of a name that is held are to be written, or have been."""
        self._make_room()
        if self._next:
            self._unpack_next()
        place = self._places[name]
        return place.within(self._room[place.first], self._likes[place.first].dtype)

    def carry(self) -> None:
        """Stage the values in use of all that is held, for an update that will write over some of them only."""
        if not self._live:  # surrendered: they lie packed where the next ones are staged
            self._unpack_next()
            return
        self._make_room()
        for panels, like, room in zip(self._live, self._likes, self._room, strict=True):
            gemm.unpack(_packed(panels, like), room)
        self._next = []

    def pack(self, place: Callable[[Tensor], Tensor]) -> None:
        """Make the next copies, of what was staged and of `place(parameter)` for parameters that are not held.

        Those in use are not touched.
        """
        self._make_room()
        if self._next:
            self._unpack_next()
        operands: list[linear.Operand] = list(map(gemm.pack_in_place, self._room, self._likes))
        operands += [_next_operand(group, place) for group in self._others]
        biases = [group.stacked_bias(place) for group in (*self._held, *self._others)]
        self._next = list(zip(operands, biases, strict=True))

    def swap(self) -> None:
        """Run from the next copies."""
        self._live, self._room = self._room, self._live
        for group, (operand, bias) in zip((*self._held, *self._others), self._next, strict=True):
            group.install(operand, bias)
        self._next = []

    def surrender(self) -> None:
        """Give up the copies in use, to be packed over; nothing may run until `swap`."""
        self._room, self._live = self._live or self._room, []
        for group in (*self._held, *self._others):
            group.unpack()

    @property
    def num_spare_bytes(self) -> int:
        """Bytes of room for the next copies, beside those in use."""
        return sum(panels.nbytes for panels in self._room)

    @property
    def num_bytes_to_spare(self) -> int:
        """Bytes that `pack` will take for it."""
        room = [] if self._room else self._likes
        others = [group.packed.panels.nbytes for group in self._others if group.packed is not None]
        return sum(4 * math.prod(gemm.panels_shape(like)) for like in room) + sum(others)

    @property
    def panels(self) -> list[Tensor]:
        """The values in use of all that is held."""
        return list(self._live)

    def copies(self) -> Iterator[Tensor]:
        """Of our own kernel: all other copies, and room for copies, that exist now."""
        operands = [*(group.packed for group in self._others), *(operand for operand, _ in self._next)]
        yield from (operand.panels for operand in operands if isinstance(operand, gemm.PackedWeight))
        yield from self._room

    def settle(self) -> None:
        """After a swap, or instead of one: forget next copies, and give their memory back if it is much."""
        self._next = []
        if sum(panels.nbytes for panels in self._room) > _KEPT_BYTES:
            give_back(self._room)  # at once, whoever still has a view of it
            self._room = []

    def make(self) -> None:
        """Run from copies of the plain weights that there are: at the start, and after `release`."""
        for group in self._others:
            group.install(linear.pack(group.weight(), group.plan), group.stacked_bias())

    def release(self, *, forget: bool = False) -> None:
        """Free what can be made again; nothing may run until `make`. `forget`: all, until a complete update."""
        self._room, self._next = [], []
        for group in self._others:
            group.unpack()
        if forget:
            self._live = []
            for group in self._held:
                group.unpack()

    def _copy(self, place: Place) -> Tensor:
        likes = self._likes[place.first : place.end]
        copies = gemm.empty_panels(likes)
        for panels, like, copy in zip(self._live[place.first : place.end], likes, copies, strict=True):
            gemm.unpack(_packed(panels, like), copy)
        return place.within(copies[0], likes[0].dtype)

    def _put_on_meta(self) -> None:
        stand_ins: dict[int, nn.Parameter] = {}
        for child in self._module.modules():
            for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                if stack := self._stacks.get(_storage(parameter)):
                    stand_in = nn.Parameter(parameter.to("meta"), requires_grad=False)
                    child.register_parameter(name, stand_ins.setdefault(id(parameter), stand_in))
                    self._parameters.append((child, name, stack.place(parameter)))

    def _make_room(self) -> None:
        if self._held and not self._room:
            self._room = gemm.empty_panels(self._likes)

    def _unpack_next(self) -> None:
        """Back to the rows that were staged."""
        for panels, like in zip(self._room, self._likes, strict=True):
            gemm.unpack(_packed(panels.clone(), like), panels)
        self._next = []


def _packed(panels: Tensor, like: Tensor) -> gemm.PackedWeight:
    return gemm.PackedWeight(panels, *like.shape, like.dtype)


def _next_operand(group: LinearGroup, place: Callable[[Tensor], Tensor]) -> linear.Operand:
    """A plan that multiplies by the plain weight goes on doing so: it will have changed in place."""
    return linear.pack(group.weight() if group.plan.kernel == linear.LIBRARY else group.weight(place), group.plan)


def _tie_embeddings(module: nn.Module, own: list[LinearGroup]) -> None:
    """Have embeddings that share their parameter with a linear of ours read what that runs from."""
    heads = {id(group.children[0].weight): group for group in own if len(group.children) == 1}
    for child in module.modules():
        if type(child) is nn.Embedding and child.max_norm is None and id(child.weight) in heads:
            read_from_head(child, heads[id(child.weight)])


def _read_in_place(module: nn.Module) -> Iterator[Tensor]:
    """Everything but the matrices that linears, routers, experts and embeddings of ours hold."""
    ours = RowInvariantLinear | RowInvariantRouter | RowInvariantExperts | PackedEmbedding
    for child in module.modules():
        yield from (p for p in child.parameters(recurse=False) if not (isinstance(child, ours) and p.dim() > 1))
        yield from child.buffers(recurse=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
