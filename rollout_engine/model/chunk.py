"""What one sequence computes in one step."""

from collections.abc import Sequence
from typing import NamedTuple


class SequenceChunk(NamedTuple):
    """Tokens [num_computed_tokens, num_computed_tokens + len(token_ids)) of one sequence, computed in one step."""

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: list[int]
    """Block table from position 0, covering the chunk."""
