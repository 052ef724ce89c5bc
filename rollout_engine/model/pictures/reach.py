"""How far tokens of pictures see past their own position, in models whose pictures attend in both directions.

    token      7  3  I  I  I  4      I: the placeholder of a picture's features
    sees up to 0  1  4  4  4  5      the position of the last key

Transformers takes neighbouring placeholders for one picture, so pictures need a token between them in such models.
"""

from collections.abc import Sequence

import numpy as np

from rollout_engine.base.errors import ConfigError


def reach_of(places: np.ndarray) -> np.ndarray:
    """Ascending positions int64 [n] of a picture's features -> int32 [n]: the neighbours of each behind it."""
    is_last = np.append(np.diff(places) != 1, True)
    last = np.flatnonzero(is_last)
    runs = np.cumsum(is_last) - is_last
    found: np.ndarray = (places[last[runs]] - places).astype(np.int32)
    return found


def reach_of_chunk(places: Sequence[np.ndarray], first: int, size: int) -> np.ndarray:
    """int32 [size]: how far tokens [first, first + size) of a sequence see, whose pictures' features have `places`.

    Raises `ConfigError` if the chunk ends inside a picture: its first tokens would need keys that are not computed yet.
    """
    reach = np.zeros(size, np.int32)
    for each in places:
        low, high = np.searchsorted(each, [first, first + size])
        reach[each[low:high] - first] = reach_of(each)[low:high]
    beyond = reach > np.arange(size)[::-1]
    if beyond.any():
        raise ConfigError(
            f"Tokens [{first}, {first + size}) of a sequence end inside a picture, whose tokens see all of it: they have "
            "to be computed together."
        )
    return reach
