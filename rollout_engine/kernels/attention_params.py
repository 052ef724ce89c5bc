"""Parameters of one attention layer's scores."""

from typing import NamedTuple


class AttentionParams(NamedTuple):
    """Attention-score parameters of one layer: scale, sliding window, soft cap."""

    scale: float
    """Factor of every query-key product."""
    sliding_window: int = 0
    """A query at position p sees keys at positions above p - sliding_window; 0 means all earlier keys."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 means no cap."""
