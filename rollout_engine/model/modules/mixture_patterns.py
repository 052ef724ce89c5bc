"""Recognises mixtures of experts that route, mix and perhaps add a shared expert, by trial."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.model.modules.forward_trial import (
    NUM_TOKENS,
    SCALES,
    Forward,
    require,
    require_same,
    unmatched_reason,
    waves,
)


class MixtureParts(NamedTuple):
    """The parts of a mixture of experts, by the names that its module has for them."""

    router: str
    experts: str
    shared: str | None = None
    """An MLP of every token."""
    shared_gate: str | None = None
    """A linear with one output, whose sigmoid multiplies that of the MLP."""
    latents: tuple[str, str] | None = None
    """Linears before all experts but the shared one, and behind their sum."""


class MixturePattern(NamedTuple):
    """How a mixture of experts puts its parts together."""

    reason: str | None
    """Why it does not only route, mix and add its shared expert; None if it does so."""
    bias_name: str | None = None
    """Its own tensor that it gives to the router in addition to the rows."""


def mixture_pattern(mixture: nn.Module, parts: MixtureParts) -> MixturePattern:
    """The pattern of `mixture`, whose children are these parts."""
    given: list[object] = []
    reason = unmatched_reason("mixture", mixture, lambda trial: _run_mixture(trial, parts, given))
    own = [*mixture.named_parameters(recurse=False), *mixture.named_buffers(recurse=False)]
    names = [name for name, tensor in own if any(each is tensor for each in given)]
    if reason is None and (len(own) != len(names) or len(names) > 1):
        reason = f"{type(mixture).__name__} has tensors of its own"
    return MixturePattern(reason, names[0] if names else None)


def _run_mixture(forward: Forward, parts: MixtureParts, given: list[object]) -> None:
    """Adds to `given` the arguments of the router after its rows."""
    weights, chosen = waves(NUM_TOKENS, 2, phase=0.4), torch.arange(2 * NUM_TOKENS).view(-1, 2)
    for scale in SCALES:
        x = waves(1, NUM_TOKENS, 8, phase=0.3) * scale

        def choose(rows: Tensor, *others: object, x: Tensor = x) -> tuple[Tensor, Tensor, Tensor]:
            require_same(rows.reshape(-1, 8), x[0], "routes other rows than its own")
            given.extend(others)
            return rows, weights, chosen

        entered = x[0] if parts.latents is None else x[0].roll(2, dims=1) * 0.8

        def mix(rows: Tensor, index: Tensor, by: Tensor, x: Tensor = entered) -> Tensor:
            require(index is chosen and by is weights, "changes the choice of its router")
            require_same(rows, x, "gives its experts other rows than its own")
            return rows.flip(1) * 1.25

        def share(rows: Tensor, x: Tensor = x) -> Tensor:
            require_same(rows.reshape(-1, 8), x[0], "gives its shared expert other rows than its own")
            return rows.roll(1, dims=-1) * 0.5

        children: dict[str, object] = {parts.router: choose, parts.experts: mix, "input_size": x.shape[2]}
        wanted, added = entered[None].flip(2) * 1.25, x.roll(1, dims=2) * 0.5
        if parts.latents is not None:
            children |= zip(
                parts.latents, (lambda rows: rows.roll(2, dims=-1) * 0.8, lambda rows: rows * 1.1), strict=True
            )
            wanted = wanted * 1.1
        if parts.shared is not None:
            children[parts.shared] = share
        if parts.shared_gate is not None:
            children[parts.shared_gate] = lambda rows: rows[..., 2:3] * 0.7
            added = added * torch.sigmoid(x[..., 2:3] * 0.7)
        result = forward(children, x)
        require_same(result, wanted if parts.shared is None else wanted + added, "adds its parts otherwise")
