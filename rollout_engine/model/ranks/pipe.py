"""One rank's place in a pipe of stages: the source of a forward's hidden states, and their receiver.

    enter ── layers of this stage ── leave

While an engine loads, each stage tries its layers alone: random numbers enter, and nothing leaves. Then
it serves: the forwards of all stages have serials, which rank 0 gives and the messages of steps and scores name.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollout_engine.kernels.cpu.turns import Turns
from rollout_engine.model.modules.row_trial import proven_operations
from rollout_engine.model.ranks.pipe_memory import Inbox, Outbox


class PassedOn(Exception):  # noqa: N818 (no error: it ends a forward whose rest is another stage's)
    """This stage's part of a forward is complete, and was passed on."""


class Pipe:
    """A rank's stage, in the order of layers, and its ends of the belts before and behind it.

    Args:
        inbox: None on the first stage.
        outbox: None on the last stage, and on ranks of a stage other than its first.
        others: barriers of all ranks, which `break_` breaks.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        inbox: Inbox | None = None,
        outbox: Outbox | None = None,
        others: Sequence[Turns] = (),
    ) -> None:
        self.stage, self.num_stages = stage, num_stages
        self.inbox, self._outbox, self._others = inbox, outbox, others
        self.serial = -1
        """The serial of the forward that is computed next, or now."""
        self._serves = self._is_held = False
        self.left: Tensor | None = None
        """Hidden states [T, H] behind this stage's last layer, run as a module."""
        self.came: Tensor | None = None
        """Routed experts of the layers before this stage, int32 [n], if the hidden states brought them."""
        self._entered: tuple[int, Tensor] | None = None
        """The serial of the last forward of modules, and its hidden states."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipe":
        """Copies of a module are of the same stage."""
        return self

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output head."""
        return self.stage == self.num_stages - 1

    def serve(self) -> None:
        """From now on hidden states pass from stage to stage."""
        self._serves = True

    def enter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The hidden states [..., T, H] that the stage before has computed in the current forward."""
        assert not self.is_first, "tokens enter the first stage"
        if not self._serves:
            generator = torch.Generator().manual_seed(math.prod(shape[:-1]))
            with proven_operations():  # they are no part of the module
                return torch.randn(*shape, generator=generator).to(dtype)
        assert self.inbox is not None, "every rank of a later stage has one"
        hidden, self.came = self.inbox.take(self.serial, dtype, shape[-1])
        return hidden.view(*shape)

    def enter_module(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Do as `enter`, for layers that run as modules: these may compute a forward again, for more of its logits."""
        if not self._serves:
            return self.enter(shape, dtype)
        if self._entered is None or self._entered[0] != self.serial:
            self._entered = self.serial, self.enter(shape, dtype)
        return self._entered[1]

    def leave(self, hidden: Tensor, experts: Tensor | None = None) -> None:
        """Pass on the hidden states [T, H] of the current forward, and the routed experts of all layers so far."""
        assert not self.is_last, "logits leave the last stage"
        if self._serves and self._outbox is not None:
            self._outbox.put(self.serial, hidden, experts)

    def skip(self) -> None:
        """Pass on that the current forward has nothing to compute, on any stage."""
        if not self.is_last:
            self.leave(torch.empty(0, 0))

    def finish_module(self, hidden: Tensor) -> None:
        """Called with the output [..., T, H] of this stage's last layer, if layers run as modules.

        While serving it raises `PassedOn`: no other part of the module is to run.
        """
        self.left = hidden.flatten(0, -2)
        if not self._serves:
            return
        if not self._is_held:
            self.leave(self.left)
        raise PassedOn

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, `finish_module` keeps its states in `left` and does not pass them on."""
        self._is_held, self.left = True, None
        try:
            yield
        except PassedOn:
            pass
        finally:
            self._is_held = False

    def break_(self) -> None:
        """Let no rank of any stage wait for another any more, and no thread at this rank's ends."""
        for turns in self._others:
            turns.break_()
        for end in self._ends:
            end.break_()

    def close(self) -> None:
        """Free this rank's ends of the belts; no thread waits there."""
        for end in self._ends:
            end.close()

    @property
    def _ends(self) -> list[Inbox | Outbox]:
        return [end for end in (self.inbox, self._outbox) if end is not None]
