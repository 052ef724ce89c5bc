"""The two products of a projection from latents, each packed for all of its heads as one matrix."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.linear_groups import LinearGroup


class HeadGroup(LinearGroup):
    """The product before attention (`absorb`), or after it (`expand`), of one projection [H * (N + V), R].

    Its weight is a transposed part of the projection's, so it is a copy next to the plain one. Without a kernel of our
    own for it there is no copy, and the plain weight is multiplied in place (`kernels.latent`).
    """

    def __init__(self, children: list[nn.Linear], *, expands: bool = False) -> None:
        """`children`: the projection alone, which has `by_head` and `nope_size`."""
        super().__init__(children)
        self._expands = expands

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"expands": self._expands}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._expands = state["expands"]

    def weight(self, place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """[H * outputs, inputs] of all heads, the outputs of each filled up with zeros to whole panels; a copy."""
        projection: Any = self.children[0]
        nope, by_head = projection.nope_size, projection.by_head(place(projection.weight.detach()))
        parts = by_head[:, nope:] if self._expands else by_head[:, :nope].mT
        return F.pad(parts, (0, 0, 0, -parts.shape[1] % gemm.PANEL)).flatten(0, 1)

    def prove(self) -> None:
        """Use our own kernel if its rows do not depend on their batch here."""
        try:
            plan = linear.plan_for(self.weight())
        except linear.NotInvariant:
            plan = linear.PLAIN
        self.plan = plan if plan.kernel == linear.OWN else linear.PLAIN

    def packed_heads(self) -> gemm.PackedWeight | None:
        """The packed weight of all heads; None: multiply by the plain one."""
        if self.gives_zeros:
            return None
        operand, _, _ = self.operand()
        return operand if isinstance(operand, gemm.PackedWeight) else None
