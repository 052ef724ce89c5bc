"""Warns that the trainer computes in another dtype than the engine, once for each dtype."""

import logging
import math
from collections import Counter
from collections.abc import Iterable

from sync.base import Metadata
from sync.manifest import counted, dtype_name, torch_dtype
from sync.quantised.tensors import DequantisedTensor
from sync.source import SourcePair

logger = logging.getLogger("rollout_engine")

_SERVED = ("float32", "bfloat16")
"""Dtypes that every engine can be made with, and a trainer can be exact in."""


class CastNotice:
    """Logs a warning when weights are cast on their way to an engine, the same once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def warn_if_cast(self, pairs: Iterable[SourcePair], metadata: Metadata) -> None:
        """Warn if floating weights differ from the dtypes of `metadata`, naming the pair of dtypes of most values.

        Tensors that the model keeps in a dtype other than its own are named apart.
        """
        own = _dtype_of_most(metadata)
        cast: Counter[tuple[str, str]] = Counter()
        kept: list[tuple[str, str, str]] = []
        for name, tensor in pairs:
            came = dtype_name(tensor.dtype)
            wanted = metadata[name][0] if name in metadata else came
            if isinstance(tensor, DequantisedTensor) or came == wanted:
                continue
            if not (tensor.dtype.is_floating_point and torch_dtype(wanted).is_floating_point):
                continue
            if wanted == own:
                cast[came, wanted] += math.prod(tensor.shape)
            elif came == own:
                kept.append((name, came, wanted))
        self._warn_of_kept(kept)
        if not cast:
            return
        ((came, wanted), _), *_ = cast.most_common()
        if (came, wanted) not in self._logged:
            self._logged.add((came, wanted))
            other = f", or make the engine with dtype='{came}'" if came in _SERVED else ""
            logger.warning(
                "The trainer is %s, the engine %s: weights are cast on the way, and ratios are exact only against a %s "
                "forward. Train in %s%s.",
                *(came, wanted, wanted, wanted, other),
            )

    def _warn_of_kept(self, kept: list[tuple[str, str, str]]) -> None:
        """Warn of tensors (name, dtype, dtype in the engine) that the model keeps in another dtype than its own."""
        if not kept or kept[0][1:] in self._logged:
            return
        name, came, wanted = kept[0]
        self._logged.add((came, wanted))
        logger.warning(
            "The model keeps %s in %s, such as '%s', and they arrive in %s: they are cast on the way. A trainer that "
            "is loaded by from_pretrained(dtype=...), and not cast as a whole, keeps them in %s, too.",
            *(counted(kept, "tensor", "tensors"), wanted, name, came, wanted),
        )


def _dtype_of_most(metadata: Metadata) -> str:
    """The dtype of most values of a model."""
    sizes: Counter[str] = Counter()
    for dtype, shape in metadata.values():
        sizes[dtype] += math.prod(shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")
