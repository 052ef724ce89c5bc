"""How attention scores become weights."""

from typing import NamedTuple


class Scoring(NamedTuple):
    """Of one attention layer."""

    scale: float
    sliding_window: int = 0
    """A query at position p sees keys at positions above p - sliding_window; 0 sees all before it."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 leaves them."""
