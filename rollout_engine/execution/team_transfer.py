"""Moves KV blocks of a model that is cut over ranks: the bytes of a block are those of all ranks' parts, in order.

save    rank 0 asks each rank for its parts, between two steps, and hands them on together
load    the step has whole blocks; each rank takes its part of them
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from rollout_engine.base.messages import KVSave
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.model.sequences.kv_transfer import KVTransfer

_ASKED_BYTES = 16 << 20
"""Bytes of blocks that are asked for at a time."""


class TeamTransfer:
    """Rank 0's transfer of all ranks' parts. Satisfies `kv_layout.Transfer`; `own`: that of rank 0's part."""

    def __init__(self, team: RankTeam, own: KVTransfer, save: Callable[[bytes, memoryview], None]) -> None:
        """Open the transfers of all other ranks. Call it before the first step."""
        self._team, self._own, self._save = team, own, save
        sizes = team.ask("open_transfer", lambda: [own.block_bytes, own.state_bytes, own.describe_shapes()])
        self.block_bytes, self.state_bytes = (sum(size[index] for size in sizes) for index in (0, 1))
        self._shapes = [size[2] for size in sizes]
        blocks, states = (list(accumulate(size[index] for size in sizes)) for index in (0, 1))
        starts = zip(blocks[:-1], states[:-1], strict=True)
        team.ask("place_transfer", apart=[dict(block_start=block, state_start=state) for block, state in starts])

    def describe_dtypes(self) -> str:
        return self._own.describe_dtypes()

    def describe_shapes(self) -> str:
        return " | ".join(self._shapes)

    def save(self, saves: Sequence[KVSave]) -> None:
        """Read blocks and slots of all ranks, some at a time, and hand them on. No step may be running."""
        count = max(1, _ASKED_BYTES // max(self.block_bytes, self.state_bytes))
        for first in range(0, len(saves), count):
            some = list(saves[first : first + count])
            parts = self._team.ask("read_kv", partial(self._own.read, some), saves=some)
            for save, *pieces in zip(some, *parts, strict=True):
                if all(pieces):  # else a device had no memory to copy one
                    self._save(save.key, memoryview(b"".join(pieces)))
