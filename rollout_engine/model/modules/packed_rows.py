"""Packed rows: several sequences end to end in one row of a batch, separated by positions that start again at 0.

    input_ids      7  3  9  4  8  5      sequences 7 3 9 · 4 8 · 5
    position_ids   0  1  2  0  1  0

Hugging Face's padding-free collators mark them like this.
"""

import threading
import weakref

import torch
from torch import Tensor

_state = threading.local()


def sequence_lengths(position_ids: Tensor | None, batch: int, length: int) -> tuple[int, ...] | None:
    """Lengths of the sequences in position_ids int64 [B or 1, T], row after row; None where every row is one sequence.

    A sequence begins with each row, and wherever a position does not follow the one before it.
    """
    if position_ids is None or length < 2:
        return None
    known = getattr(_state, "lengths", None)
    if known is not None and known[0]() is position_ids and known[1] == _version(position_ids) is not None:
        lengths: tuple[int, ...] | None = known[2]
        return lengths
    lengths = _sequence_lengths(position_ids.expand(batch, length))
    # All layers of a forward are given the same tensor.
    _state.lengths = weakref.ref(position_ids), _version(position_ids), lengths
    return lengths


def starts_of(position_ids: Tensor) -> Tensor:
    """bool [B, T]: where position_ids [B, T] begin a sequence."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def positions_from(cu_seqlens: Tensor, length: int) -> Tensor:
    """cu_seqlens int [N + 1], from 0 to `length` -> position_ids int64 [1, length]. Raises `ValueError` for others."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        kind = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens must be int32 or int64 [number of sequences + 1], got {kind}")
    edges = cu_seqlens.long()
    sizes = edges.diff()
    if len(edges) < 2 or int(edges[0]) != 0 or int(edges[-1]) != length or bool((sizes < 1).any()):
        shown = f"[{', '.join(map(str, edges[:4].tolist()))}{', ...' if len(edges) > 4 else ''}]"
        last = int(edges[-1]) if len(edges) else None
        raise ValueError(
            f"cu_seqlens must rise from 0 to {length}, the number of tokens in input_ids, by at least 1 a sequence; "
            f"got {shown} ending at {last}"
        )
    starts = edges[:-1].repeat_interleave(sizes)
    return (torch.arange(length, device=edges.device) - starts)[None]


def expect_packed_rows(expected: bool) -> None:
    """Set whether this thread's forward has packed rows; attention that gets no positions is then refused."""
    _state.expected = expected


def packed_rows_expected() -> bool:
    """The last value given to `expect_packed_rows`."""
    return getattr(_state, "expected", False)


def _sequence_lengths(position_ids: Tensor) -> tuple[int, ...] | None:
    starts = starts_of(position_ids)
    if not bool(starts[:, 1:].any()):
        return None
    first = starts.flatten().nonzero().flatten()
    ends = torch.cat([first[1:], first.new_tensor([starts.numel()])])
    return tuple((ends - first).tolist())


def _version(tensor: Tensor) -> int | None:
    """A counter of in-place writes; None where torch does not count them."""
    return None if tensor.is_inference() else tensor._version
