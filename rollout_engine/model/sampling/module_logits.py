"""Logits of a Hugging Face causal LM that runs as a module, a bounded piece at a time if they are many.

Between its base model and its logits, a causal LM may do more than one product: it scales, caps, adds. Only its own
forward has them all. So its head is that forward over given hidden states, in a twin of the module that shares
everything with it but the base model. If the two cannot be separated, the forward runs again for each piece.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.model.sampling.logit_rows import LogitRows, max_rows

logger = logging.getLogger("rollout_engine")

Forward = Callable[[Tensor], Any]
"""Runs a step; takes the rows int64 [R] whose logits it is to compute, and returns the module's output."""


def module_logits(
    module: nn.Module, forward: Forward, rows: Tensor, vocab_size: int, *, may_repeat: bool = False
) -> LogitRows:
    """Logits of these rows int64 [R] of a step, by `forward`, which runs `module`.

    Many rows are left to be computed as they are taken, to the bits of one forward if a row's bits do not depend on
    the other rows. If the head cannot be separated, `may_repeat` is whether `forward` may be called again until
    the last row is taken, once for each piece, and watchers of layers see each call; else all rows are computed now.
    """
    if len(rows) <= max_rows(vocab_size, rows.device):
        return LogitRows.of(forward(rows).logits[0])
    apart = _apart(module, forward, rows)
    if apart is not None:
        return LogitRows(*apart, vocab_size)
    _warn(type(module), may_repeat)
    if may_repeat:
        return LogitRows(rows, lambda some: forward(some).logits[0], vocab_size)
    return LogitRows.of(forward(rows).logits[0])


def _apart(module: nn.Module, forward: Forward, rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Hidden states [R, H] of these rows, and the head for some of them; None if they cannot be separated."""
    base = getattr(module, "base_model", module)
    place = next((name for name, child in module.named_children() if child is base), None)
    if place is None:
        return None
    outputs: list[Any] = []
    hook = base.register_forward_hook(lambda _, arguments, output: outputs.append(output))
    try:
        first = forward(rows[:1]).logits[0]
    finally:
        hook.remove()
    if len(outputs) != 1 or not isinstance(getattr(outputs[0], "last_hidden_state", None), Tensor):
        return None
    hidden = outputs[0].last_hidden_state[0, rows]
    twin = copy.copy(module)
    given = _GivenStates(type(outputs[0]))
    twin._modules = {**module._modules, place: given}

    def head(states: Tensor) -> Tensor:
        given.states = states[None]
        token_ids = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        logits: Tensor = twin(input_ids=token_ids, use_cache=False, logits_to_keep=0).logits[0]
        return logits

    found = None
    with suppress(Exception):  # the module's own code, given inputs that it does not expect
        found = head(hidden[:1])
    return (hidden, head) if found is not None and _are_same(found, first) else None


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


_warned: set[type] = set()


def _warn(kind: type, may_repeat: bool) -> None:
    if kind not in _warned:
        _warned.add(kind)
        effect = "compute the layers again for each piece, and are slow" if may_repeat else "hold all of them at once"
        logger.warning(
            "%s: its head cannot be told apart from its layers, so steps with more logits than are held at a time %s. "
            "A smaller max_num_seqs avoids such steps.",
            kind.__name__,
            effect,
        )


class _GivenStates(nn.Module):
    """A base model whose hidden states are given."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        """`kind` makes its output."""
        super().__init__()
        self._kind = kind
        self.states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind(last_hidden_state=self.states)
