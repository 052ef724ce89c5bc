"""The packed copies that a module's linears multiply by, all replaced at once.

    staging(name) ... ──> pack(place) ──> swap()      the next values are staged and packed next to the copies in use,
                                                      while steps continue; at a step boundary the two change places

A weight that our own kernel multiplies by, and that nothing else reads, exists packed only: after
`take_over` the module's parameter is on meta. Int8 codes do not give their weight back, which therefore stays.
Memory for the next copies is allocated during an update, and kept between updates while it is small.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_engine.base.errors import LifecycleError
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.kernels.memory import release_pages
from rollout_engine.model.packing.changed_panels import ChangedPanels, Ranges
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear, linear_groups, without_products
from rollout_engine.model.packing.packed_embedding import PackedEmbedding, read_from_head
from rollout_engine.model.packing.stacks import Place, stacks_of

_KEPT_BYTES = 256 << 20
"""Most memory for next copies that all ranks of a model together keep between updates. Fresh pages cost an update
up to a second per gigabyte."""


class PackedWeights:
    """The packed weights of a module after `make_row_invariant`, with plans proven. Without groups calls are no-ops.

    Linears stop checking whether a weight was written: only `swap` changes their operands. `num_ranks`: how many
    processes the model is cut over, of which each has such weights.
    """

    def __init__(self, module: nn.Module, num_ranks: int = 1) -> None:
        groups = linear_groups(module)
        own = [group for group in groups if group.plan.kernel == linear.OWN and not group.as_int8]
        _tie_embeddings(module, own)
        self._module, self._num_ranks = module, num_ranks
        read = _storages_read(module) if own else set()
        self._stacks = stacks_of(own, {_storage(tensor) for tensor in _read_in_place(module)} | read)
        """Stacks by the address of their plain storage; none after `take_over`."""
        self._held = [group for stack in self._stacks.values() for group in stack.groups]
        """Groups whose weights exist packed only."""
        self._likes = [stack.like for stack in self._stacks.values() for _ in stack.groups]
        held = {id(group) for group in self._held}
        self._others = [group for group in groups if id(group) not in held]
        self._live: list[Tensor] = []
        """Panels in use of `_held`, one piece of memory; none when asleep without values."""
        self._room: list[Tensor] = []
        """Panels of the next copies."""
        self._next: list[tuple[linear.Operand, Tensor | None]] = []
        """The next operand and bias of `_held`, then of `_others`."""
        self._changed = ChangedPanels(self._likes)
        """Panels that `pack_changed` makes anew."""
        self._anew: list[tuple[LinearGroup, linear.Operand, Tensor | None]] = []
        """Groups with their next operand and bias, made by `pack_changed`."""
        self._places: dict[str, Place] = {}
        """Places in panels by accepted name."""
        self._parameters: list[tuple[nn.Module, str, Place]] = []
        """Module, attribute and place of the parameters on meta."""
        if self._held:
            self._live = gemm.empty_panels(self._likes)
            for group, panels in zip(self._held, self._live, strict=True):
                group.install(gemm.pack(group.weight(), panels), group.stacked_bias())
        self.make()
        for group in groups:
            group.follows_writes = False

    def take_over(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Free the plain values of weights that exist packed only; call it once, when nothing reads them any more.

        Returns `targets`, names and views of plain storage, with meta tensors if `holds` is true.
        """
        for name, view in targets.items():
            if stack := self._stacks.get(_storage(view)):
                self._places[name] = stack.place(view)
        self._put_on_meta()
        self._stacks = {}
        return {name: view.to("meta") if name in self._places else view for name, view in targets.items()}

    def holds(self, name: str) -> bool:
        """Whether the values of `name` exist packed only."""
        return name in self._places

    def plain(self, name: str) -> Tensor:
        """A plain copy of packed values in use. Raises `LifecycleError` when they were released."""
        if not self._live:
            raise LifecycleError(f"'{name}' has no values now: weights were released. Send a complete update.")
        return self._copy(self._places[name])

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the module's parameters on meta are copies of the values in use; writing to them changes nothing."""
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
        """The place of the next values of a name that `holds` is true of."""
        self._make_room()
        if self._next:
            self._unpack_next()
        place = self._places[name]
        return place.within(self._room[place.first], self._likes[place.first].dtype)

    def carry(self) -> None:
        """Stage all packed values in use, for an update that overwrites only some of them."""
        if not self._live:  # surrendered: they are packed in the place of the next ones
            self._unpack_next()
            return
        self._make_room()
        for panels, like, room in zip(self._live, self._likes, self._room, strict=True):
            gemm.unpack(gemm.PackedWeight.like(like, panels), room)
        self._next = []

    def pack(self, place: Callable[[Tensor], Tensor]) -> None:
        """Make the next copies, from staged values and, for weights that exist plain too, from `place(parameter)`.

        The copies in use are not touched.
        """
        self._make_room()
        if self._next:
            self._unpack_next()
        operands: list[linear.Operand] = list(map(gemm.pack_in_place, self._room, self._likes))
        operands += [_next_operand(group, place) for group in self._others]
        biases = [group.stacked_bias(place) for group in (*self._held, *self._others)]
        self._next = list(zip(operands, biases, strict=True))

    def swap(self) -> None:
        """Multiply by the next copies from now on."""
        self._live, self._room = self._room, self._live
        for group, (operand, bias) in zip((*self._held, *self._others), self._next, strict=True):
            group.install(operand, bias)
        self._next = []

    def takes_pieces(self, name: str) -> bool:
        """Whether pieces of the values of a name that `holds` is true of can be replaced, and not only all of them."""
        return self._places[name].is_ordered

    def carry_changed(self, changed: Mapping[str, Ranges | None]) -> None:
        """Prepare to stage these names only, before they are staged: keep the other values of their panels.

        Each name has the ranges of its elements, row-major, that are staged, or None for all.
        """
        places = [(self._places[name], ranges) for name, ranges in changed.items() if self.holds(name)]
        self._changed = ChangedPanels(self._likes, places)
        if places:
            self._make_room()
        self._changed.carry(self._live, self._room)

    def pack_changed(self, place: Callable[[Tensor], Tensor], changed: set[int]) -> None:
        """Make the next copies of the weights given to `carry_changed`, and of groups whose plain parameters change.

        `changed`: addresses of the storages of such parameters, whose next values `place` returns. The copies in use
        are not touched.
        """
        self._changed.pack(self._live, self._room)

        def next_values(live: Tensor) -> Tensor:
            return place(live) if _storage(live) in changed else live

        held = {id(group) for group in self._held}
        self._anew = []
        for group in (*self._held, *self._others):
            parameters = [tensor for child in group.children for tensor in (child.weight, child.bias)]
            if any(tensor is not None and _storage(tensor) in changed for tensor in parameters):
                operand = group.operand()[0] if id(group) in held else _next_operand(group, next_values)
                self._anew.append((group, operand, group.stacked_bias(next_values)))

    def swap_changed(self) -> None:
        """Multiply by the copies that `pack_changed` has made from now on; all other copies stay in use."""
        for group, operand, bias in self._anew:
            group.install(operand, bias)
        if self._changed.is_swapped:
            self._live, self._room = self._room, self._live
            for group, panels, like in zip(self._held, self._live, self._likes, strict=True):
                group.install(gemm.PackedWeight.like(like, panels), group.operand()[1])
        else:
            self._changed.copy(self._live, self._room)
        self._changed, self._anew = ChangedPanels(self._likes), []

    def surrender(self) -> None:
        """Let the next copies overwrite those in use; nothing may run until `swap`."""
        self._room, self._live = self._live or self._room, []
        for group in (*self._held, *self._others):
            group.unpack()

    @property
    def num_spare_bytes(self) -> int:
        """Bytes held for the next copies, in addition to those in use."""
        return sum(panels.nbytes for panels in self._room)

    @property
    def num_bytes_to_spare(self) -> int:
        """Bytes that `pack` will allocate."""
        room = [] if self._room else self._likes
        others = [group.packed.panels.nbytes for group in self._others if group.packed is not None]
        return sum(4 * math.prod(gemm.panels_like(like)) for like in room) + sum(others)

    @property
    def is_without_values(self) -> bool:
        """Whether weights that exist packed only have lost their values."""
        return bool(self._held) and not self._live

    @property
    def panels(self) -> list[Tensor]:
        """The panels in use of weights that exist packed only."""
        return list(self._live)

    def copies(self) -> Iterator[Tensor]:
        """All other copies for our own kernel, and memory for copies, that exist now."""
        operands = [*(group.packed for group in self._others), *(operand for operand, _ in self._next)]
        yield from (operand.panels for operand in operands if isinstance(operand, gemm.PackedWeight))
        yield from self._room

    def settle(self) -> None:
        """Drop the next copies, after a swap or instead of one, and free their memory if it is large."""
        self._next, self._changed, self._anew = [], ChangedPanels(self._likes), []
        if sum(panels.nbytes for panels in self._room) * self._num_ranks > _KEPT_BYTES:
            release_pages(self._room)  # at once, even if there are still views of it
            self._room = []

    def make(self) -> None:
        """Pack the weights that exist plain too: at the start, and after `release`."""
        for group in self._others:
            group.install(linear.pack(group.weight(), group.plan), group.stacked_bias())

    def release(self, *, forget: bool = False) -> None:
        """Free all that `make` can restore; nothing may run until then. `forget`: free all, until a complete update."""
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
            gemm.unpack(gemm.PackedWeight.like(like, panels), copy)
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
        """Unpack the next copies into staged rows."""
        for panels, like in zip(self._room, self._likes, strict=True):
            gemm.unpack(gemm.PackedWeight.like(like, panels.clone()), panels)
        self._next = []


def _next_operand(group: LinearGroup, place: Callable[[Tensor], Tensor]) -> linear.Operand:
    """The next operand of a group; torch's kernel multiplies by a plain weight, which changes in place."""
    changes_in_place = group.plan.kernel == linear.LIBRARY and group.weight().is_contiguous()
    return linear.pack(group.weight() if changes_in_place else group.weight(place), group.plan)


def _tie_embeddings(module: nn.Module, own: list[LinearGroup]) -> None:
    """Make embeddings that share their parameter with a head read the head's packed weight."""
    heads = {id(group.children[0].weight): group for group in own if len(group.children) == 1}
    for child in module.modules():
        if type(child) is nn.Embedding and child.max_norm is None and id(child.weight) in heads:
            read_from_head(child, heads[id(child.weight)])


def _read_in_place(module: nn.Module) -> Iterator[Tensor]:
    """All tensors except the matrices of our own linears, routers, experts and embeddings."""
    for child in module.modules():
        is_ours = isinstance(child, RowInvariantLinear | PackedEmbedding) or hasattr(child, "_groups")
        yield from (p for p in child.parameters(recurse=False) if not (is_ours and p.dim() > 1))
        yield from child.buffers(recurse=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages_read(module: nn.Module) -> set[int]:
    """Addresses of the storages that a forward of two tokens of a causal LM reads, except by our own products.

    Hugging Face's code may multiply by `linear.weight` without calling the linear, as some routers do. Such a weight
    must keep its plain values: torch does not always refuse a product with a tensor on meta, and returns garbage then.
    """
    watch = _Watch()
    with torch.no_grad(), without_products(module), watch:
        module(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    return watch.storages


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:  # views read nothing; reads through them are seen
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.storages.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return func(*args, **(kwargs or {}))
