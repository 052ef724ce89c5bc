"""Random prompts, none of them ever drawn twice: engines remember prefixes."""

import random


class FreshPrompts:
    """Token ids below `vocab_size`; the same sequence of draws in every run."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def draw(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        """[num_prompts][num_tokens], ids from 3: those below have special meanings."""
        return [[self._rng.randrange(3, self._vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]
