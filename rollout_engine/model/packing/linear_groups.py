"""Linears whose output rows do not depend on their batch, computed from packed copies of the weights.

q/k/v and gate/up run as one GEMM each. Names in `state_dict` do not change. In the engine their weights are also views
of one buffer (`fuse_projections`).
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.module_types import become

_FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def swap_linears(module: nn.Module) -> None:
    """Make every `nn.Linear` below `module` a `RowInvariantLinear`, in place; siblings share one GEMM."""
    for group in linears_by_input(module, (nn.Linear, RowInvariantLinear)):
        shared = LinearGroup(group)
        shared.float32_out = isinstance(group[0], RowInvariantLinear) and group[0]._group.float32_out
        for slot, child in enumerate(group):
            swapped = become(child, RowInvariantLinear)
            swapped._group, swapped._slot = shared, slot


def fuse_projections(module: nn.Module) -> None:
    """Move q/k/v and gate/up weights into one buffer each; the parameters become row slices of it."""
    for group in linears_by_input(module, (nn.Linear, RowInvariantLinear)):
        if len(group) == 1:
            continue
        for name in ("weight", "bias"):
            parameters = [getattr(child, name) for child in group]
            if parameters[0] is None:
                continue
            buffer = torch.cat([p.data for p in parameters])
            for parameter, view in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
                parameter.data = view


def repack(module: nn.Module) -> None:
    """Rebuild every packed copy from the live weights, after they were written in place."""
    for group in linear_groups(module):
        group.repack()


@contextmanager
def without_products(module: nn.Module) -> Iterator[None]:
    """Inside, our products and embeddings return zeros without reading weights, so that only other operations run."""
    groups = linear_groups(module)
    for group in groups:
        group.gives_zeros = True
    try:
        yield
    finally:
        for group in groups:
            group.gives_zeros = False


def linear_groups(module: nn.Module) -> list["LinearGroup"]:
    """Every group below `module`, once."""
    modules = list(module.modules())
    shared = [child._group for child in modules if isinstance(child, RowInvariantLinear)]
    own = [group for child in modules for group in getattr(child, "_groups", ())]
    heads = [group for child in modules for group in getattr(child, "_head_groups", ())]
    return list({id(group): group for group in shared + own + heads}.values())


class PackCount:
    """Number of operands installed so far, in one group or in several that share the count."""

    def __init__(self) -> None:
        self.num_packs = 0


class LinearGroup:
    """One GEMM over the linears of `children`, which share their input.

    The first child called computes all outputs; the others take their slice if they get the same input tensor.

    On a trainer every product first digests the live weights and repacks them if they changed. Nothing else notices all
    writes: fused optimizers, `.data`, merges and swaps leave `Tensor._version` as it is. Reading a weight once costs
    little compared with multiplying many rows by it.
    """

    def __init__(self, children: list[nn.Linear]) -> None:
        self.children = children
        self.plan = linear.PLAIN
        self.follows_writes = True
        """Whether a product first checks that the weights are those it packed; else only `install` changes them."""
        self.gives_zeros = False
        """Products return zeros, inside `without_products`."""
        self.float32_out = False
        """Whether results are float32 whatever the dtype of the weights. Call `prove` after setting it."""
        self.as_int8 = False
        """Whether the weights are rounded to int8 codes, in the engine alone. Call `prove` after setting it."""
        self.add_to: Callable[[Tensor, Tensor], None] | None = None
        """Called with x [R, K] and its products [R, sum of N], to add to these in place; in the engine alone."""
        self._operand: linear.Operand | None = None
        self._bias: Tensor | None = None
        self._packed_values: tuple[int, ...] = ()
        """`_values` of the weights that the operand was packed from."""
        self.packs = PackCount()
        """Counts new operands; the groups of a module's experts have one for all."""
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies start unpacked: the packed operand is derived, and oneDNN's layout cannot be copied."""
        kept = {name: getattr(self, name) for name in ("children", "float32_out", "as_int8", "packs")}
        return kept  # copied together, groups share their count as before

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["children"])  # type: ignore[misc]
        self.float32_out, self.as_int8, self.packs = state["float32_out"], state["as_int8"], state["packs"]

    def output(self, slot: int, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of child `slot`]."""
        if self._input is not x or slot not in self._waiting:
            self._waiting = dict(enumerate(self._compute(x)))
            self._input = x
        result = self._waiting.pop(slot)
        if not self._waiting:
            self._input = None
        return result

    def prove(self) -> None:
        """Find a plan whose rows do not depend on their batch. Raises `kernels.linear.NotInvariant`."""
        self.plan = linear.plan_for(self.weight(), float32_out=self.float32_out, as_int8=self.as_int8)

    def repack(self) -> None:
        """Pack the live weights."""
        self._pack(self._values() if self.follows_writes else ())

    def install(self, operand: linear.Operand, bias: Tensor | None) -> None:
        """Multiply by this operand from now on."""
        self._operand, self._bias = operand, bias
        self.packs.num_packs += 1

    def weight(self, place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """The children's weights stacked, [sum of N, K]; each is read from `place(weight)`."""
        return stacked([place(child.weight.detach()) for child in self.children])

    def stacked_bias(self, place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor | None:
        """The children's biases stacked, [sum of N], a copy; None without biases."""
        if self.children[0].bias is None:
            return None
        return stacked([place(child.bias.detach()) for child in self.children]).clone()

    def unpack(self) -> None:
        self._operand = self._bias = None

    def matmul(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, sum of N], without autograd."""
        if self.gives_zeros:
            dtype = torch.float32 if self.float32_out else x.dtype
            return x.new_zeros(len(x), sum(child.out_features for child in self.children), dtype=dtype)
        out = linear.matmul(x, *self.operand())
        if self.add_to is not None:
            self.add_to(x, out)
        return out

    def operand(self) -> tuple[linear.Operand, Tensor | None, linear.RowPlan]:
        """The arguments of `linear.matmul` after x."""
        if self.follows_writes:
            values = self._values()
            if self._operand is None or values != self._packed_values:
                self._pack(values)
        elif self._operand is None:
            self.repack()
        assert self._operand is not None
        return self._operand, self._bias, self.plan

    @property
    def packed(self) -> gemm.PackedWeight | None:
        """The operand, if it is packed for our own kernel."""
        return self._operand if isinstance(self._operand, gemm.PackedWeight) else None

    def product(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """x [R, K] -> [R, N] of each child; gradients reach x, and the children's parameters as they are given here."""
        sizes = [child.out_features for child in self.children]
        out = (
            _GroupedLinear.apply(x, self, len(sizes), *weights, *biases) if torch.is_grad_enabled() else self.matmul(x)
        )
        return out.split(sizes, dim=-1) if len(sizes) > 1 else (out,)

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        biases = [child.bias for child in self.children if child.bias is not None]
        parts = self.product(x.reshape(-1, x.shape[-1]), [child.weight for child in self.children], biases)
        return tuple(part.view(*x.shape[:-1], part.shape[-1]) for part in parts)

    def _pack(self, values: tuple[int, ...]) -> None:
        self.prove()
        self.install(linear.pack(self.weight(), self.plan), self.stacked_bias())
        self._packed_values = values

    def _values(self) -> tuple[int, ...]:
        """Address and xxh3-64 digest of every weight and bias; an operand may be the weight itself, at its address."""
        tensors = [t.detach() for child in self.children for t in (child.weight, child.bias) if t is not None]
        return tuple(part for t in tensors for part in (t.data_ptr(), _digest(t)))


def _digest(tensor: Tensor) -> int:
    tensor = tensor.contiguous()
    # By address: a numpy view would prevent the storage from being resized, which FSDP does.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


class RowInvariantLinear(nn.Linear):
    """An `nn.Linear` whose output rows do not depend on their batch; siblings that share the input are one GEMM."""

    _group: LinearGroup
    _slot: int

    def forward(self, input: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # inside `own_forwards` each call of torch would pass through Python
            return self._group.output(self._slot, input)


class _GroupedLinear(torch.autograd.Function):
    """The packed product forward; ordinary matrix products backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: LinearGroup, num_weights: int, *parameters: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.num_weights = num_weights
        ctx.save_for_backward(x, *parameters[:num_weights])
        return group.matmul(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        grad = grad.to(x.dtype)  # float32 for a float32 head
        grads = grad.split([len(w) for w in weights], dim=-1)
        needs = ctx.needs_input_grad
        grad_x = grads[0] @ weights[0] if needs[0] else None
        if grad_x is not None:
            for part, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(part, weight)
        grad_w = [g.t() @ x if need else None for g, need in zip(grads, needs[3:], strict=False)]
        grad_b = [g.sum(0) if need else None for g, need in zip(grads, needs[3 + ctx.num_weights :], strict=False)]
        return grad_x, None, None, *grad_w, *grad_b


def linears_by_input(module: nn.Module, classes: tuple[type, ...]) -> Iterator[list[nn.Linear]]:
    """Every linear of these classes below `module`, once: siblings that can share one GEMM together, others alone."""
    taken: set[int] = set()
    for parent in list(module.modules()):
        children = dict(parent.named_children())
        for names in _FUSED_NAMES:
            siblings = [s for name in names if isinstance(s := children.get(name), nn.Linear) and type(s) in classes]
            if len(siblings) == len(names) and len({_signature(s) for s in siblings}) == 1:
                taken.update(id(s) for s in siblings)
                yield siblings
        for child in children.values():
            if type(child) in classes and id(child) not in taken:
                taken.add(id(child))
                yield [child]  # type: ignore[list-item]


def _signature(child: nn.Linear) -> tuple[object, ...]:
    return child.in_features, child.bias is None, child.weight.dtype


def stacked(parts: list[Tensor]) -> Tensor:
    """The parts stacked: a view if they are neighbours in one buffer, else a copy."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != end:
            return torch.cat(parts)
        end += part.numel()
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    return torch.as_strided(first, shape, first.stride(), first.storage_offset())
