"""Positions of tokens on three axes (time, height, width), for text models that rotate by them.

A picture's features stand on a grid: they share one time, and the text behind a picture continues from its longest
side. Transformers' `get_rope_index` places each picture; text counts up on all axes alike.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.base.pictures import PlacedPicture

_AXES = 3


class AxisPositions(NamedTuple):
    """Positions of the tokens of one sequence on three axes."""

    first: Tensor
    """int64 [3, P]: those of the first P tokens, up to the end of the last picture."""
    delta: int
    """Position of any later token on all axes, less its index."""

    def between(self, start: int, end: int) -> Tensor:
        """Those of tokens [start, end): int64 [3, end - start]."""
        num_first = self.first.shape[1]
        later = torch.arange(max(start, num_first), max(end, num_first)) + self.delta
        return torch.cat([self.first[:, start:end], later.expand(_AXES, -1)], 1)


def picture_positions(owner: nn.Module, placed: Sequence[PlacedPicture]) -> AxisPositions | None:
    """Positions of a sequence with these pictures, in order; None if the model counts its tokens one by one.

    `owner`: a composite, or its parts without text.
    """
    places: Any = next((child for child in owner.modules() if hasattr(type(child), "get_rope_index")), None)
    if places is None or not placed:
        return None
    parts: list[Tensor] = []
    token = position = 0
    for each in placed:
        parts.append(torch.arange(position, position + each.start - token).expand(_AXES, -1))
        position += each.start - token
        count = each.end - each.start
        ones = torch.ones(1, count, dtype=torch.int64)
        grids = {
            name: torch.from_numpy(array.copy()) for name, array in each.picture.arrays.items() if name.endswith("_thw")
        }
        found, delta = places.get_rope_index(ones, mm_token_type_ids=ones, **grids)
        parts.append(found[:, 0] + position)
        token, position = each.end, position + count + int(delta)
    return AxisPositions(torch.cat(parts, 1), position - token)
