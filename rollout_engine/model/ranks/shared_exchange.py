"""Tensors that ranks on one machine exchange through memory that they share.

    memory     turns │ numbers │ window │ decoder │ two places of gathered tensors, used in turn
               ──────┴─────────┘
               a page each

A tensor is gathered in three moves: each rank writes its part, all meet, each reads the whole. The next gathering uses
the other place, so that no rank overwrites values that another still reads: it has met the others once more by then.
"""

import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import Turns
from rollout_engine.model.ranks.exchange import WINDOW_BYTES, Exchange
from rollout_engine.model.ranks.share import Share

_PAGE = 4096
_DECODER_BYTES = 2 << 30
_PLACE_BYTES = 4 << 30
TOTAL_BYTES = 2 * _PAGE + WINDOW_BYTES + _DECODER_BYTES + 2 * _PLACE_BYTES
"""Bytes of addresses. Memory is taken as it is written."""
_MAX_RANKS = _PAGE // 16


class SharedExchange(Exchange):
    """One rank's end.

    Args:
        descriptor: of a file of zeros that all ranks have open, in memory; it may be closed afterwards.
        start: byte at which the `TOTAL_BYTES` of this exchange begin; a multiple of a page.
    """

    window_is_shared = True

    def __init__(self, descriptor: int, rank: int, num_ranks: int, start: int = 0) -> None:
        assert num_ranks <= _MAX_RANKS, "each rank has a number of its own"
        super().__init__(rank, num_ranks)
        memory = torch.frombuffer(mmap.mmap(descriptor, TOTAL_BYTES, offset=start), dtype=torch.uint8)
        sizes = [_PAGE, _PAGE, WINDOW_BYTES, _DECODER_BYTES, _PLACE_BYTES, _PLACE_BYTES]
        turns, numbers, self.window, self.decoder_memory, *self._places = memory.split(sizes)
        self.turns = Turns(turns, num_ranks)
        self._numbers = numbers.view(torch.int64).view(2, -1)[:, :num_ranks]
        self._count = self._num_agreements = 0

    def meet(self) -> None:
        self.turns.meet()

    def break_(self) -> None:
        self.turns.break_()

    def gathering(self, share: Share) -> Callable[[Tensor], Tensor]:
        return partial(self.gather_columns, share=share)

    def gather_columns(self, part: Tensor, share: Share) -> Tensor:
        """The whole [..., whole] of which every rank gives its columns [..., size] of `share`."""
        rows = part.numel() // share.size
        place = self._next(rows * share.whole, part.dtype).view(rows, share.whole)
        place[:, share.rows].copy_(part.reshape(rows, share.size))
        self.turns.meet()
        return place.clone().view(*part.shape[:-1], share.whole)

    def gather_rows(self, part: Tensor, first: int, num_rows: int) -> Tensor:
        place = self._next(num_rows * part.shape[1], part.dtype).view(num_rows, part.shape[1])
        place[first : first + len(part)].copy_(part)
        self.turns.meet()
        return place.clone()

    def merge_rows(self, rows: Tensor, own: Tensor) -> Tensor:
        place = self._next(rows.numel(), rows.dtype).view(rows.shape)
        index = own.numpy()
        place.view(torch.uint8).numpy()[index] = rows.contiguous().view(torch.uint8).numpy()[index]
        self.turns.meet()
        return place.clone()

    def add_up(self, part: Tensor) -> Tensor:
        place = self._next(self.num_ranks * part.numel(), part.dtype).view(self.num_ranks, *part.shape)
        place[self.rank].copy_(part)
        self.turns.meet()
        return place.sum(0)

    def agree(self, number: int) -> list[int]:
        slot = self._numbers[self._num_agreements % 2]
        self._num_agreements += 1
        slot[self.rank] = number
        self.turns.meet()
        return [int(each) for each in slot]

    def _next(self, count: int, dtype: torch.dtype) -> Tensor:
        """The place of the next gathered tensor, [count] of this dtype."""
        num_bytes, self._count = count * dtype.itemsize, self._count + 1
        if num_bytes > _PLACE_BYTES:
            what = f"Ranks exchange up to {_PLACE_BYTES} bytes at a time, and this step has a tensor of {num_bytes}"
            raise ConfigError(f"{what}. Give a smaller max_num_batched_tokens.")
        place: Tensor = self._places[self._count % 2][:num_bytes].view(dtype)
        return place
