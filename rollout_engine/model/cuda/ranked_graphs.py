"""CUDA graphs of one rank: all ranks capture the same ones, and replay them together.

    rank 0    tell size ── upload ── [send inputs ── forward ─┬─ ... ─┬─ draw]
    rank 1    hear size ──────────── [receive     ── forward ─┴─ ... ─┴─ draw]      what it draws, nobody reads

What ranks exchange is part of the graph, from the inputs of rank 0 on, so the others are told only which graph it is.

**Unproven on hardware**: that NCCL's launches are captured and replayed is how torch and NCCL are documented.
"""

from collections.abc import Callable
from typing import Any

import torch

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.cuda.decode_graphs import DecodeGraphs, Variant
from rollout_engine.model.cuda.ranked_model import RankedCudaModel


class RankedDecodeGraphs(DecodeGraphs):
    """The graphs of one rank of a model with fused layers.

    While an engine loads, all ranks capture in step. Then rank 0 decides, and tells the others.
    """

    _model: RankedCudaModel

    def __init__(self, model: RankedCudaModel, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        model.exchange.before_leaving(self._drop)

    @torch.inference_mode()
    def follow_capture(self, size: int, *, has_prefixes: bool, has_adapters: bool, is_first: bool) -> None:
        """Do what `capture_graph` tells this rank."""
        if is_first:
            self.void()
        self._model.kv.memory.restore()
        super()._try(size, Variant(has_prefixes, has_adapters))

    @torch.inference_mode()
    def follow_replay(self, size: int, *, has_prefixes: bool, has_adapters: bool) -> None:
        """Do what `replay_graph` tells this rank."""
        self._replay_own((size, Variant(has_prefixes, has_adapters)))

    def _try(self, size: int, variant: Variant) -> None:
        if (followers := self._model.followers()) is None:
            return super()._try(size, variant)
        if super()._may_capture():
            followers.capture_graph(size, **variant._asdict(), is_first=not self._graphs)
            with self._model.seat.together():
                super()._try(size, variant)

    def _replay(self, key: tuple[int, Variant]) -> None:
        if (followers := self._model.followers()) is None:
            return self._replay_own(key)
        followers.replay_graph(key[0], **key[1]._asdict())
        with self._model.seat.together():
            self._replay_own(key)

    def _replay_own(self, key: tuple[int, Variant]) -> None:
        if key not in self._graphs:
            raise BrokenTurnsError("the ranks have left one another")
        super()._replay(key)

    def _may_capture(self) -> bool:
        """Whether rank 0 may: its time and its memory count."""
        return bool(self._model.exchange.agree(super()._may_capture())[0])

    def _all_agree(self, condition: bool) -> bool:
        return self._model.seat.all_agree(condition)

    def _note_failure(self, key: tuple[int, Variant], problem: Exception) -> None:
        """End the engine: what other ranks have captured, and what they wait for, is not known."""
        raise ConfigError(
            f"A CUDA graph of {key[0]} sequences was not captured ({type(problem).__name__}: {problem}), and ranks "
            "cannot go on behind that. Give cuda_graphs=False."
        ) from problem

    def _computation(self, size: int, variant: Variant) -> Callable[[], None]:
        compute, inputs = super()._computation(size, variant), self._inputs.memory(size)

        def together() -> None:
            try:
                self._model.exchange.copy_from_first(inputs)
                compute()
            except torch.OutOfMemoryError as problem:  # no want of room that only leaves a graph out: others wait here
                raise RuntimeError(str(problem)) from problem

        return together

    def _drop(self) -> None:
        """Let go of graphs: NCCL leaves no group before those that have captured its steps are gone."""
        self._graphs.clear()
