"""float32 masters of a trainer's 16-bit weights, for any optimizer of `torch.optim`.

A bfloat16 number has 8 significant bits: a step smaller than half the distance to its neighbour is rounded away, and at
usual learning rates nearly all are. The optimizer therefore steps on float32 copies, and each step writes them to the
weights, rounded. The forward stays the model's own, which is the engine's too.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rollout_engine.base.errors import ConfigError
from sync.change_notice import ChangeNotice

logger = logging.getLogger("rollout_engine")

_KEY = "float32_masters"
"""Key of the copies in an optimizer's `state_dict`."""
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def float32_masters(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer step on float32 copies of its 16-bit weights, and write them back rounded; returns it.

    >>> optimizer = float32_masters(torch.optim.AdamW(model.parameters(), lr=1e-6))

    Call it before the first step; weights of other dtypes stay as they are. Until a step, gradients are those of the
    weights: clip `model.parameters()`, not the tensors in the optimizer's groups. Weights that other code has changed
    between two steps are copied anew. `optimizer.state_dict()` contains the copies under "float32_masters", and
    `load_state_dict` takes them: a training that resumes loses nothing. Raises `ConfigError` for an optimizer that has
    stepped; its `step` does so for a closure, whose gradients would arrive too late, and its `load_state_dict` for the
    copies of other weights.
    """
    if any("step" not in state or state["step"] > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "float32_masters: the optimizer has stepped already, on the weights themselves. Call it when you make one: "
            "optimizer = float32_masters(torch.optim.AdamW(model.parameters(), lr=1e-6))."
        )
    pairs: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        _replace_weights(optimizer, group, pairs)
    optimizer.register_step_pre_hook(partial(_bring_gradients, pairs))
    optimizer.register_step_post_hook(partial(_write_weights, pairs))
    optimizer.register_state_dict_post_hook(partial(_save_masters, pairs))
    optimizer.register_load_state_dict_pre_hook(partial(_load_masters, pairs))
    ChangeNotice.trainer_has_masters |= bool(pairs)
    optimizer.zero_grad = partial(_zero_gradients, optimizer.zero_grad, pairs)  # type: ignore[method-assign]
    optimizer.add_param_group = partial(  # type: ignore[method-assign]
        _add_group, optimizer.add_param_group, optimizer, pairs
    )
    return optimizer


def _replace_weights(optimizer: Optimizer, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Put masters in the place of a group's weights, and of those of its state, which some optimizers have at once."""
    weights = group["params"]
    group["params"] = [_master_of(weight, pairs) for weight in weights]
    for weight, master in zip(weights, group["params"], strict=True):
        if master is not weight and weight in optimizer.state:
            state = optimizer.state.pop(weight)
            optimizer.state[master] = {
                name: value.float() if isinstance(value, Tensor) else value for name, value in state.items()
            }


def _add_group(add: Any, optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]], param_group: dict[str, Any]) -> None:
    known = {id(weight) for weight, _ in pairs}
    add(param_group)
    if any(id(weight) in known for weight in optimizer.param_groups[-1]["params"]):
        optimizer.param_groups.pop()
        raise ConfigError("float32_masters: add_param_group: the optimizer has some of these weights already.")
    _replace_weights(optimizer, optimizer.param_groups[-1], pairs)


def _master_of(weight: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The float32 copy of a 16-bit weight, which joins `pairs`; any other weight itself."""
    if weight.dtype not in _SIXTEEN_BITS:
        return weight
    master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
    pairs.append((weight, master))
    return master


@torch.no_grad()
def _bring_gradients(pairs: list[tuple[Tensor, Tensor]], optimizer: Any, args: Any, kwargs: Any) -> None:
    """Move the gradients of weights to their masters, and copy weights anew that are not their masters' rounded."""
    if any(each is not None for each in (*args[1:], kwargs.get("closure"))):  # the first is the optimizer
        raise ConfigError("float32_masters: step takes no closure. Call backward before it.")
    for weight, master in pairs:
        if not torch.equal(weight, master.to(weight.dtype)):
            master.copy_(weight)
        master.grad = None if weight.grad is None else weight.grad.float()
        weight.grad = None


@torch.no_grad()
def _write_weights(pairs: list[tuple[Tensor, Tensor]], optimizer: Any, args: Any, kwargs: Any) -> None:
    for weight, master in pairs:
        if master.grad is not None:
            weight.copy_(master)
            master.grad = None


def _save_masters(pairs: list[tuple[Tensor, Tensor]], optimizer: Any, state_dict: dict[str, Any]) -> None:
    state_dict[_KEY] = [master.detach() for _, master in pairs]


@torch.no_grad()
def _load_masters(pairs: list[tuple[Tensor, Tensor]], optimizer: Any, state_dict: dict[str, Any]) -> None:
    saved = state_dict.get(_KEY)
    if saved is None:
        logger.warning(
            "float32_masters: the loaded state has no masters, as that of an optimizer without them: they begin as "
            "copies of the rounded weights."
        )
        return
    shapes, expected = [list(each.shape) for each in saved], [list(master.shape) for _, master in pairs]
    if shapes != expected:
        raise ConfigError(
            f"float32_masters: load_state_dict: expected masters of {len(expected)} weights, and {len(shapes)} came, "
            "or of other shapes: load the state of an optimizer of the same model and groups."
        )
    for (_, master), each in zip(pairs, saved, strict=True):
        master.copy_(each)


def _zero_gradients(zero_grad: Any, pairs: list[tuple[Tensor, Tensor]], set_to_none: bool = True) -> None:
    zero_grad(set_to_none)
    for weight, _ in pairs:
        weight.grad = None
