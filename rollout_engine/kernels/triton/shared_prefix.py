"""Prefixes that neighbouring sequences of a batch share, so that they are read once for all of them.

Samples of one prompt are adjacent in a batch and begin with the same block ids. Their tokens become items over the
prefix (`work.WorkList.put`), whose results are parts that the sequences' own items continue from.
"""

from typing import NamedTuple

import numpy as np

from rollout_engine.kernels.triton.work import COLUMNS, FULL_CONTEXT


class SharedPrefixes(NamedTuple):
    """Shared prefixes of N sequences that decode one token each, token i of sequence i."""

    items: np.ndarray
    """int32 [P, COLUMNS]: items of neighbouring sequences, at most `tokens_per_item` each."""
    units: np.ndarray
    """int32 [N]: units of each sequence that its group shares; 0 without a group."""

    @property
    def num_items(self) -> np.ndarray:
        """Number of items, int32 [1]."""
        return np.array([len(self.items)], np.int32)


def shared_prefixes(
    block_tables: np.ndarray, context_lens: np.ndarray, *, block_size: int, unit: int, tokens_per_item: int
) -> SharedPrefixes:
    """Find groups of neighbours in block_tables [N, max_blocks] with context_lens [N], the token to decode included.

    A group grows while that does not reduce its saving: (members - 1) x the units that they share.
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
                items.append((start, start, size, FULL_CONTEXT, shared * unit, 0, shared, 0))
        first = end
    return SharedPrefixes(np.array(items, np.int32).reshape(-1, COLUMNS), units)


def _common_units(block_tables: np.ndarray, context_lens: np.ndarray, block_size: int, unit: int) -> list[int]:
    """Units of leading blocks that each pair of neighbours has in common, before either's last position."""
    same = block_tables[1:] == block_tables[:-1]
    num_blocks = np.where(same.all(1), same.shape[1], same.argmin(1)) if same.size else np.zeros(len(same), np.int64)
    positions = np.minimum(num_blocks * block_size, np.minimum(context_lens[1:], context_lens[:-1]) - 1)
    return [max(0, int(units)) for units in positions // unit]


def _group(common: list[int], first: int) -> tuple[int, int]:
    """End of the group that begins with sequence `first`, and its shared units; 0 for a group of one."""
    shared = common[first]
    following = common[first + 1] if first + 1 < len(common) else 0
    if not shared or following > shared:  # the next sequence shares more with the one after it
        return first + 1, 0
    end = first + 2
    while end - 1 < len(common):
        fewer = min(shared, common[end - 1])
        if fewer * (end - first) < shared * (end - first - 1):
            break
        shared, end = fewer, end + 1
    return end, shared
