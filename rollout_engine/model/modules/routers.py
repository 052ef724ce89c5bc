"""Routers of mixtures of experts: found in a Hugging Face module, their choices recorded, and choices given to them.

A router is a module with one matrix [E, H] that returns (..., experts int64 [T, k]); it has k as `top_k`, or calls
`topk`. Its weights of experts are its own even if it is given the experts: only its `torch.topk` over all experts
returns the given ones, with their probabilities, and the architecture's own operations before and after that are
unchanged, gradients included.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.model.modules.module_patterns import names_in_forward


def routers_of(module: nn.Module) -> list[nn.Module]:
    """The routers below `module`, in the order in which its layers compute."""
    return [child for child in module.modules() if _top_k_of(child) is not None]


def routing_info(routers: Sequence[nn.Module]) -> RoutingInfo | None:
    """Sizes of these routers; None if there are none, or they are not all alike."""
    found = {(_num_experts(router), _top_k_of(router)) for router in routers}
    if len(found) != 1:
        return None
    ((num_experts, top_k),) = found
    assert top_k is not None, "it is one number for each router"
    return RoutingInfo(len(routers), num_experts, top_k)


def call_router(child: nn.Module) -> Any:
    """The result of the forward, without hooks, for two tokens of zeros; None if `child` cannot be called as a router.

    A forward may read one more tensor than tokens [2, H] or [1, 2, H]: the bias [E] with which it chooses.
    """
    weight = _matrix_of(child)
    if weight is None:
        return None
    x = weight.new_zeros(2, weight.shape[1])
    extra = [weight.new_zeros(len(weight))] * (len(inspect.signature(child.forward).parameters) - 1)
    for rows in (x, x[None]):
        with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError, AttributeError):
            return child.forward(rows, *extra)
    return None


def _num_experts(router: nn.Module) -> int:
    weight = _matrix_of(router)
    assert weight is not None, "a router has one"
    return len(weight)


def _matrix_of(child: nn.Module) -> Tensor | None:
    """The only parameter with several rows, of `child` or of a part of it; None if there is another number of them."""
    found = [parameter for parameter in child.parameters() if parameter.squeeze().dim() > 1]
    return found[0] if len(found) == 1 and found[0].dim() == 2 else None


@contextmanager
def recording(routers: Sequence[nn.Module]) -> Iterator[list[Tensor | None]]:
    """Inside, record each router's choice in the last forward: experts int64 [T, k]; None before the first."""
    chosen: list[Tensor | None] = [None] * len(routers)

    def record(index: int, router: nn.Module, given: Any, output: tuple[Tensor, ...]) -> None:
        chosen[index] = output[-1]

    with ExitStack() as hooks:
        for index, router in enumerate(routers):
            hooks.callback(router.register_forward_hook(partial(record, index)).remove)
        yield chosen


class Passes:
    """Counts the forwards of a model's routers."""

    num_forwards = 0
    num_recomputed = 0
    """Forwards in a backward, which computes layers again under gradient checkpointing."""


@contextmanager
def replaying(routers: Sequence[nn.Module], experts: Tensor) -> Iterator[Passes]:
    """Inside, routers choose `experts` int64 [T, number of routers, k] for the T tokens of a forward.

    If they are negative, a router chooses its own. Raises `RequestError` in a forward of another number of tokens.
    """
    passes = Passes()
    with ExitStack() as hooks:
        for index, router in enumerate(routers):
            replay = _Replay(experts[:, index], passes)
            hooks.callback(router.register_forward_pre_hook(replay.begin).remove)
            hooks.callback(router.register_forward_hook(replay.end, always_call=True).remove)
        yield passes


class _Replay:
    """Gives one router its experts, in each of its forwards."""

    def __init__(self, experts: Tensor, passes: Passes) -> None:
        self._experts, self._passes = experts, passes
        self._running: list[_GivenExperts] = []

    def begin(self, router: nn.Module, given: tuple[Any, ...]) -> None:
        num_tokens = given[0].numel() // given[0].shape[-1]
        if num_tokens != len(self._experts):
            bound = f"one entry for each of the {num_tokens} tokens of this forward, padding included"
            raise RequestError.for_field("routed_experts", f"{len(self._experts)} tokens", bound)
        mode = _GivenExperts(self._experts.to(given[0].device), _num_experts(router))
        self._passes.num_forwards += 1
        self._passes.num_recomputed += torch._C._current_graph_task_id() >= 0
        mode.__enter__()
        self._running.append(mode)

    def end(self, router: nn.Module, given: Any, output: Any) -> None:
        if not self._running:
            return
        mode = self._running.pop()
        mode.__exit__(None, None, None)
        if output is not None and mode.num_given != 1:
            raise ConfigError(
                f"{type(router).__name__} cannot replay experts: it does not choose {self._experts.shape[-1]} of "
                f"{_num_experts(router)} by one torch.topk."
            )


class _GivenExperts(TorchFunctionMode):
    """`torch.topk` over all experts returns the given ones, int64 [T, k]."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.num_given = 0
        """How often it did."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.shape != self._experts.shape:
            return result
        values = args[0] if args else kwargs["input"]
        if values.shape[-1] != self._num_experts:
            return result
        self.num_given += 1
        experts = torch.where(self._experts < 0, result.indices, self._experts)
        return torch.return_types.topk((values.gather(-1, experts), experts))


def _top_k_of(child: nn.Module) -> int | None:
    """How many experts `child` chooses for each row, by trial; None if it is no router."""
    top_k = getattr(child, "top_k", None)
    if not isinstance(top_k, int) and "topk" not in names_in_forward(child):
        return None
    output = call_router(child)
    chosen = output[-1] if isinstance(output, tuple) and output else None
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.dim() != 2 or len(chosen) != 2:
        return None
    found = chosen.shape[1]
    return found if top_k in (None, found) else None
