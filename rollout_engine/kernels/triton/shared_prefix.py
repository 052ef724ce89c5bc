"""Which sequences of a batch read the same blocks first, so that those are read once for all of them.

Samples of one prompt stand side by side in a batch and begin with the same block ids. Their tokens become items over
the prefix (`work.WorkList.put`); what `attend` leaves of these as parts, the sequences' own items go on from.
"""

from typing import NamedTuple

import numpy as np

from rollout_engine.kernels.triton.work import COLUMNS, EVERYWHERE


class SharedPrefixes(NamedTuple):
    """Of sequences that decode one token each: token i is sequence i's."""

    items: np.ndarray
    """int32 [P, COLUMNS]: of neighbours, at most `tokens_per_item` to an item."""
    units: np.ndarray
    """int32 [N]: what of each sequence its neighbours read too; 0 where nobody does."""

    @property
    def num_items(self) -> np.ndarray:
        """int32 [1]."""
        return np.array([len(self.items)], np.int32)


def shared_prefixes(
    block_tables: np.ndarray, context_lens: np.ndarray, *, block_size: int, unit: int, tokens_per_item: int
) -> SharedPrefixes:
    """block_tables [N, max_blocks] and context_lens [N], the token to come counted.

    A group grows as long as that does not lessen what it saves: members beyond the first x units they share.
    """
    count = len(context_lens)
    units = np.zeros(count, np.int32)
    items: list[tuple[int, ...]] = []
    common = _common_units(block_tables, context_lens, block_size, unit)
    first = 0
    while first < count - 1:
        end, shared = _group(common, first)
        if end - first > 1:
            units[first:end] = shared
            for start in range(first, end, tokens_per_item):
                size = min(tokens_per_item, end - start)
                items.append((start, start, size, EVERYWHERE, shared * unit, 0, shared, 0))
        first = end
    return SharedPrefixes(np.array(items, np.int32).reshape(-1, COLUMNS), units)


def _common_units(block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, unit: int) -> list[int]:
    """Of each neighbouring pair: whole units in blocks that both begin with, before either's last position."""
    same = block_tables[1:] == block_tables[:-1]
    num_blocks = np.where(same.all(1), same.shape[1], same.argmin(1)) if same.size else np.zeros(len(same), np.int64)
    positions = np.minimum(num_blocks * block_size, np.minimum(context_lens[1:], context_lens[:-1]) - 1)
    return [max(0, int(units)) for units in positions // unit]


def _group(common: list[int], first: int) -> tuple[int, int]:
    """The end of the group that begins with sequence `first`, and its units; a group of one shares nothing."""
    shared = common[first]
    following = common[first + 1] if first + 1 < len(common) else 0
    if not shared or following > shared:  # the next one has closer neighbours
        return first + 1, 0
    end = first + 2
    while end - 1 < len(common):
        fewer = min(shared, common[end - 1])
        if fewer * (end - first) < shared * (end - first - 1):
            break
        shared, end = fewer, end + 1
    return end, shared
