"""Parameters of one attention layer's scores, and of queries that see past their own position."""

from typing import NamedTuple

from torch import Tensor


class AttentionParams(NamedTuple):
    """Attention-score parameters of one layer: scale, sliding window, soft cap."""

    scale: float
    """Factor of every query-key product."""
    sliding_window: int = 0
    """A query at position p sees keys at positions above p - sliding_window; 0 means all earlier keys."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 means no cap."""


class Reach(NamedTuple):
    """How far queries see past their own position: tokens of a picture may see all of it.

        position   0  1  2  3  4  5      tokens 2 to 4 are those of a picture
        tokens     0  0  2  1  0  0

    A window begins at the position of the query as ever.
    """

    tokens: Tensor
    """int32 [T], or [B, T] in a trainer's batch: how many positions behind its own each query sees.

    They are in the same sequence and computed with it; the last position that is seen never falls from one token of a
    sequence to the next.
    """
    in_windows_alone: bool = False
    """Whether only layers with a sliding window see them."""

    def of(self, params: AttentionParams) -> Tensor | None:
        """`tokens` in a layer with these parameters; None: its queries see no later position."""
        return None if self.in_windows_alone and not params.sliding_window else self.tokens

    def at(self, tokens: Tensor) -> "Reach":
        """Those of a single row of `tokens` int64 [N], numbers of tokens in the flattened batch."""
        return self._replace(tokens=self.tokens.flatten().index_select(0, tokens)[None])
