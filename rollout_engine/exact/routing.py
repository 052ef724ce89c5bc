"""Routing replay for trainers: a mixture of experts sends each token to the experts that it had in the rollout ("R3").

    batch = policy.rollout(prompts, SamplingParams(return_routed_experts=True))
    with routing.replay(model, batch["routed_experts"]):
        logits = model(input_ids=batch["tokens", "full"]).logits

Only the choice is replayed. Weights of experts are the router's own probabilities of them, normalised as the
architecture does it, and carry gradients. The model may be any Hugging Face mixture of experts whose routers choose by
one `torch.topk`, whether `exact.enable` has been called on it or not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.routed_experts import RoutingInfo, check_expert_ids
from rollout_engine.model.modules.routers import recording, replaying, routers_of, routing_info

__all__ = ["Recorded", "flipped", "padded", "record", "replay"]


@contextmanager
def replay(model: nn.Module, routed_experts: Any) -> Iterator[None]:
    """Inside, forwards of `model` send each token to the experts given for it.

    Args:
        model: a causal LM, also inside a wrapper.
        routed_experts: integers [B, T, L, k] for forwards of B * T tokens, padding included, or [N, L, k] for those of
            N; L layers that have a router, k experts each. If all k are -1, a router makes its own choice: what
            `padded` and rollouts fill in for padding and for the last token of a sequence.

    Gradient checkpointing computes layers once more in the backward, which therefore belongs inside as well. Raises
    `RequestError` for other shapes and dtypes, ids of experts that do not exist or stand twice, and for a forward of
    another number of tokens; `ConfigError` for a model without routers, and if layers would be computed again
    outside.
    """
    routers, info = _routers(model)
    rows = _rows("routed_experts", routed_experts, info)
    recomputes = torch.is_grad_enabled() and _checkpoints(model)
    with replaying(routers, rows) as passes:
        yield
    if recomputes and passes.num_forwards and not passes.num_recomputed:
        raise ConfigError(
            "Gradient checkpointing computes the layers again in the backward, and without the routed experts they "
            "would go to others: call backward() inside routing.replay, or enter torch.no_grad() before it if there is "
            "none."
        )


class Recorded:
    """The choices of a model's routers in its last forward."""

    def __init__(self, chosen: Sequence[Tensor | None]) -> None:
        self._chosen = chosen

    @property
    def routed_experts(self) -> Tensor:
        """int16 [N, L, k] of the N tokens of the last forward. Raises `ConfigError` if there was none."""
        found = [experts for experts in self._chosen if experts is not None]
        if len(found) < len(self._chosen):
            raise ConfigError("routing.record: not every router has computed. Call the model inside the context first.")
        return torch.stack(found, 1).to(torch.int16)


@contextmanager
def record(model: nn.Module) -> Iterator[Recorded]:
    """Inside, record which experts the routers choose. Raises `ConfigError` for a model without routers."""
    routers, _ = _routers(model)
    with recording(routers) as chosen:
        yield Recorded(chosen)


def padded(routed_experts: Sequence[Any], length: int) -> Tensor:
    """Pad routed experts of several sequences, [n, L, k] each with n up to `length`: int16 [B, length, L, k].

    Padding is -1 and stands on the right. Raises `RequestError` for sequences that do not fit each other or `length`.
    """
    rows = [np.asarray(each) for each in routed_experts]
    if not rows or any(each.ndim != 3 or each.shape[1:] != rows[0].shape[1:] or len(each) > length for each in rows):
        shapes, bound = [list(each.shape) for each in rows], f"one or more [n up to {length}, L, k], L and k alike"
        raise RequestError.for_field("routed_experts", shapes[:8], bound)
    result = torch.full((len(rows), length, *rows[0].shape[1:]), -1, dtype=torch.int16)
    for index, each in enumerate(rows):
        result[index, : len(each)] = torch.from_numpy(each.astype(np.int16))
    return result


def flipped(first: Tensor, second: Tensor) -> Tensor:
    """Positions at which two forwards chose different sets of experts: integers [..., L, k] of both -> bool [..., L].

    False if either has -1. The order of the k experts does not count.
    """
    one, two = first.long(), second.long().to(first.device)
    differ = (one.sort(-1).values != two.sort(-1).values).any(-1)
    return differ & (one >= 0).all(-1) & (two >= 0).all(-1)


def for_batch(model: nn.Module, routed_experts: Any, mask: Tensor) -> Tensor:
    """Routed experts of a batch whose real tokens are by `mask` bool [B, T]: int16 [B, T, L, k], -1 elsewhere.

    `routed_experts` has T columns, or T - 1: of all tokens but the last. Raises as `replay`.
    """
    _, info = _routers(model)
    given = torch.as_tensor(np.asarray(routed_experts) if not isinstance(routed_experts, Tensor) else routed_experts)
    batch, length = mask.shape
    fits = given.dim() == 4 and given.shape[0] == batch and given.shape[1] in (length, length - 1)
    if not fits or not _is_integral(given) or tuple(given.shape[2:]) != info.shape:
        bound = f"integers [{batch}, {length} or {length - 1}, {', '.join(map(str, info.shape))}]"
        raise RequestError.for_field("routed_experts", f"{given.dtype} {list(given.shape)}", bound)
    result = torch.full((batch, length, *info.shape), -1, dtype=torch.int16, device=mask.device)
    result[:, : given.shape[1]] = given.to(mask.device, torch.int16)
    return result.masked_fill(~mask[..., None, None], -1)


def _routers(model: nn.Module) -> tuple[list[nn.Module], RoutingInfo]:
    routers = routers_of(model)
    info = routing_info(routers)
    if info is None:
        what = "no routers" if not routers else "routers that are not all alike"
        raise ConfigError(f"{type(model).__name__} has {what}, so there is no routing to replay.")
    return routers, info


def _rows(field: str, given: Any, info: RoutingInfo) -> Tensor:
    rows = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if rows.dim() not in (3, 4) or not _is_integral(rows) or tuple(rows.shape[-2:]) != info.shape:
        bound = f"integers [B, T, {info.num_layers}, {info.top_k}] or [N, {info.num_layers}, {info.top_k}]"
        raise RequestError.for_field(field, f"{rows.dtype} {list(rows.shape)}", bound)
    check_expert_ids(field, rows.cpu().numpy(), info)
    return rows.reshape(-1, *info.shape).long()


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _checkpoints(model: nn.Module) -> bool:
    return any(child.training and getattr(child, "gradient_checkpointing", False) for child in model.modules())
