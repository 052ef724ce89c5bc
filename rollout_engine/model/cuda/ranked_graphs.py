"""CUDA graphs of one rank: all ranks run the same steps, so they capture the same graphs, and replay them together.

    rank 0    upload ── prepare ── [forward ─┬─ ... ─┬─ draw]
    rank 1    upload ── prepare ── [forward ─┴─ ... ─┴─ draw]      this draw is not read

The exchanges of a forward are part of the graph.

**Unproven on hardware**: that NCCL's launches are captured and replayed is how torch and NCCL are documented.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs, Variant
from rollout_engine.model.ranks.group_exchange import GroupExchange
from rollout_engine.model.ranks.seat import Seat


class RankedDecodeGraphs(DecodeGraphs):
    """The graphs of one rank of a model with fused layers: a graph is captured on all ranks, or on none."""

    def __init__(self, *args: Any, seat: Seat, **options: Any) -> None:
        """`seat`: of the rank."""
        self._seat = seat
        super().__init__(*args, **options)
        cast(GroupExchange, seat.exchange).before_leaving(self._drop)

    def _replay(self, key: tuple[int, Variant]) -> None:
        if key not in self._graphs:
            raise BrokenTurnsError("the ranks have left one another")
        super()._replay(key)

    def _may_capture(self) -> bool:
        """Whether rank 0 may: its time and its memory count."""
        return bool(self._seat.exchange.agree(super()._may_capture())[0])

    def _all_agree(self, condition: bool) -> bool:
        return self._seat.all_agree(condition)

    def _note_failure(self, key: tuple[int, Variant], problem: Exception) -> None:
        """End the engine: the captures of other ranks, and their waits, are unknown."""
        raise ConfigError(
            f"A CUDA graph of {key[0]} sequences was not captured ({type(problem).__name__}: {problem}), and ranks "
            "cannot go on behind that. Give cuda_graphs=False."
        ) from problem

    def _computation(self, size: int, variant: Variant) -> Callable[[], None]:
        compute = super()._computation(size, variant)

        def together() -> None:
            try:
                compute()
            except torch.OutOfMemoryError as problem:  # no want of room that only leaves a graph out: others wait here
                raise RuntimeError(str(problem)) from problem

        return together

    def _drop(self) -> None:
        """Release graphs: NCCL leaves no group before those that have captured its steps are gone."""
        self._graphs.clear()
