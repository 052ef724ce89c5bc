"""Packed rows: several sequences end to end in one row of a batch, separated by positions that start again at 0.

    input_ids      7  3  9  4  8  5      sequences 7 3 9 · 4 8 · 5
    position_ids   0  1  2  0  1  0

Hugging Face's padding-free collators mark them like this. In a batch of one row a sequence may also begin at a later
position: then it continues the first tokens of the sequence before it, and these are computed once for both.

    input_ids      7  3  9  4  8  5      sequences 7 3 9 4 · 7 3 8 5
    position_ids   0  1  2  3  2  3
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

TOKEN_POSITIONS = "token_positions"
"""Argument of a decoder, which it passes on to attention: position_ids [B, T] as above, if its own have three axes."""
REACH = "token_reach"
"""Argument of a decoder, which it passes on to attention: the `Reach` of a trainer's batch [B, T]."""
_state = threading.local()


class PackedSequences(NamedTuple):
    """The sequences that a batch of B * T tokens holds, each whole in `tokens`, end to end."""

    lengths: tuple[int, ...]
    """They add up to S."""
    tokens: Tensor | None = None
    """int64 [S]: index among the B * T of each token of each sequence; None: they stand in this order."""
    places: Tensor | None = None
    """int64 [B * T]: index of the first occurrence of each of them in `tokens`."""


def packed_sequences(position_ids: Tensor | None, batch: int, length: int) -> PackedSequences | None:
    """The sequences in position_ids int64 [B or 1, T], row after row; None if every row is one sequence.

    A sequence begins with each row, and wherever a position does not follow the one before it.
    """
    if position_ids is None or length < 2:
        return None
    known = getattr(_state, "known", None)
    if known is not None and known[0]() is position_ids and known[1] == _version(position_ids) is not None:
        found: PackedSequences | None = known[2]
        return found
    found = _packed_sequences(position_ids.expand(batch, length))
    # All layers of a forward are given the same tensor.
    _state.known = weakref.ref(position_ids), _version(position_ids), found
    return found


def starts_of(position_ids: Tensor) -> Tensor:
    """bool [B, T]: whether position_ids [B, T] begin a sequence."""
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


@contextmanager
def sharing_prefixes() -> Iterator[None]:
    """Inside, this thread's forwards may have sequences that begin at later positions."""
    _state.sharing = True
    try:
        yield
    finally:
        _state.sharing = False


def prefixes_are_shared() -> bool:
    """Whether this thread is inside `sharing_prefixes`."""
    return getattr(_state, "sharing", False)


def _packed_sequences(position_ids: Tensor) -> PackedSequences | None:
    starts = starts_of(position_ids)
    if not bool(starts[:, 1:].any()):
        return None
    first = starts.flatten().nonzero().flatten()
    sizes = torch.cat([first[1:], first.new_tensor([starts.numel()])]) - first
    begins = position_ids.flatten()[first]
    lengths = begins + sizes
    is_shared = len(position_ids) == 1 and bool(begins.any())
    # Positions of padding may be anything, and then do not fit together.
    if not is_shared or int(begins[0]) or bool((begins[1:] > lengths[:-1]).any()):
        return PackedSequences(tuple(sizes.tolist()))
    return _with_prefixes(first.tolist(), begins.tolist(), lengths, position_ids.device)


def _with_prefixes(first: list[int], begins: list[int], lengths: Tensor, device: torch.device) -> PackedSequences:
    """Sequences of `lengths` whose own tokens stand from `first` on, each behind `begins` tokens of the one before."""
    sizes = lengths.tolist()
    rows, places, end = [torch.empty(0, dtype=torch.int64, device=device)], [], 0
    for start, begin, size in zip(first, begins, sizes, strict=True):
        own = torch.arange(start, start + size - begin, device=device)
        rows.append(torch.cat([rows[-1][:begin], own]))
        places.append(torch.arange(end + begin, end + size, device=device))
        end += size
    return PackedSequences(tuple(sizes), torch.cat(rows), torch.cat(places))


def _version(tensor: Tensor) -> int | None:
    """A counter of in-place writes; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version
