"""The model of one rank on a device: rank 0 tells the others of each step, and all launch it together.

    rank 0    tell forms ── send batch ── forward ─┬─ ... ─┬─ head ── draw
    rank 1    hear forms ── receive    ── forward ─┴─ ... ─┴─ head
                                                 columns gathered

What is told through the host are forms alone; the batch, with tokens that only rank 0's device knows, follows from
device to device. So no host waits for a device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.triton.adapters import AdapterBatch
from rollout_engine.kernels.triton.paged_attention import Batch, Prefixes
from rollout_engine.model.cuda.attention import CudaBatch, CudaKVPool
from rollout_engine.model.cuda.model import CudaModel
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.group_exchange import Form, GroupExchange, form_of
from rollout_engine.model.ranks.seat import Followers, Seat
from rollout_engine.model.sampling.logit_rows import LogitRows

_STEPS = 0
"""The number of the pool that steps use."""


class DeviceFollowers(Followers, Protocol):
    """The ranks from 1 on, each with a device of its own. What follows a call is sent by the exchange."""

    def forward_on_device(
        self, forms: list[Form], num_decodes: int, pool: int, *, has_adapters: bool, is_routed: bool
    ) -> None:
        """Compute a batch, whose tensors of these forms follow, over a pool by its number."""

    def capture_graph(self, size: int, *, has_prefixes: bool, has_adapters: bool, is_first: bool) -> None:
        """Capture a graph. `is_first`: all earlier ones are void."""

    def replay_graph(self, size: int, *, has_prefixes: bool, has_adapters: bool) -> None:
        """Replay it; its inputs are sent by the exchange."""

    def open_pool(self, pool: int, num_blocks: int) -> None:
        """Make another pool."""

    def close_pool(self, pool: int) -> None:
        """Free it."""


class RankedCudaModel(CudaModel):
    """One rank's part of a model and of its KV pool."""

    def __init__(self, *args: Any, seat: Seat, **options: Any) -> None:
        self.seat, self.num_ranks = seat, seat.num_ranks
        super().__init__(*args, **options)
        self.kv.on_copy = self._announce_copies
        self._pools = {_STEPS: self.kv}
        self._numbers = count(_STEPS + 1)

    @torch.inference_mode()
    def forward_rows(self, batch: CudaBatch, rows: Tensor, pool: CudaKVPool | None = None) -> LogitRows:
        if (followers := self.followers()) is None:
            return super().forward_rows(batch, rows, pool)
        tensors = _tensors_of(batch, rows)
        number = next(key for key, each in self._pools.items() if each is (pool or self.kv))
        forms = [form_of(each) for each in tensors]
        has = {"has_adapters": batch.adapters is not None, "is_routed": batch.routed is not None}
        with self.seat.together():
            followers.forward_on_device(forms, batch.attention.num_decodes, number, **has)
            self.exchange.send(tensors)
            return super().forward_rows(batch, rows, pool)

    @contextmanager
    def another_pool(self, num_blocks: int) -> Iterator[CudaKVPool]:
        followers, number = self.followers(), next(self._numbers)
        if followers is not None:
            followers.open_pool(number, num_blocks)
        try:
            with super().another_pool(num_blocks) as pool:
                self._pools[number] = pool
                yield pool
        finally:
            self._pools.pop(number, None)
            if followers is not None:
                followers.close_pool(number)

    @torch.inference_mode()
    def follow_forward(
        self, forms: Sequence[Form], num_decodes: int, pool: int, *, has_adapters: bool, is_routed: bool
    ) -> None:
        """Do what `forward_on_device` tells this rank."""
        tensors = self.exchange.receive(forms)
        batch, rows = _batch_of(tensors, num_decodes, has_adapters=has_adapters, is_routed=is_routed)
        self.kv.memory.restore()
        self.forward_rows(batch, rows, self._pools[pool])

    def follow_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do what `copy_blocks` tells this rank."""
        self.kv.memory.restore()
        self.kv.copy_blocks(pairs)

    @torch.inference_mode()
    def follow_head(self, form: Form) -> None:
        """Do what `head` tells this rank."""
        (hidden,) = self.exchange.receive([form])
        if self.decoder is None:
            self.module.get_output_embeddings()(hidden)
        else:
            self.decoder.head(hidden)

    def follow_open(self, pool: int, num_blocks: int) -> None:
        """Do what `open_pool` tells this rank."""
        self._pools[pool] = self._make_pool(num_blocks=num_blocks)

    def follow_close(self, pool: int) -> None:
        """Do what `close_pool` tells this rank."""
        del self._pools[pool]

    @property
    def exchange(self) -> GroupExchange:
        """This rank's end of what ranks exchange."""
        return cast(GroupExchange, self.seat.exchange)

    def followers(self) -> DeviceFollowers | None:
        """The other ranks, if they must be told of what is computed now; None where they compute it anyway."""
        return cast(DeviceFollowers | None, self.seat.alone)

    def _before_head(self, hidden: Tensor) -> None:
        if (followers := self.followers()) is not None:
            followers.head(hidden)

    def _announce_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        if (followers := self.followers()) is not None:
            followers.copy_blocks(list(pairs))


def check_cut(cut: ModelCut) -> None:
    """Raise `ConfigError` for a cut that ranks do not compute on devices."""
    what = f"tensor_parallel_size={cut.seat.num_ranks} with device='cuda'"
    others = [type(child).__name__ for child, _ in cut.experts if not hasattr(child, "_is_expert_parallel")]
    if others:
        raise ConfigError(f"{what}: {others[0]} cannot be divided among devices. Leave tensor_parallel_size out.")


def _tensors_of(batch: CudaBatch, rows: Tensor) -> list[Tensor]:
    attention = batch.attention
    tensors = [rows, batch.token_ids, batch.positions, batch.slots]
    tensors += [attention.token_starts, attention.context_lens, attention.block_tables]
    tensors += [] if batch.routed is None else [batch.routed]
    return tensors + list(batch.adapters or ()) + list(attention.prefixes or ())


def _batch_of(
    tensors: Sequence[Tensor], num_decodes: int, *, has_adapters: bool, is_routed: bool
) -> tuple[CudaBatch, Tensor]:
    """The batch and its rows that `_tensors_of` gave."""
    rows, token_ids, positions, slots, starts, lens, tables, *more = tensors
    routed, more = (more[0], more[1:]) if is_routed else (None, more)
    adapters, prefixes = (AdapterBatch(*more[:2]), more[2:]) if has_adapters else (None, more)
    attention = Batch(starts, lens, tables, num_decodes, Prefixes(*prefixes) if prefixes else None)
    return CudaBatch(token_ids, positions, slots, attention, adapters, routed), rows
