"""Warns that the trainer computes in another dtype than the engine, once for each dtype."""

import logging
import math
from collections import Counter
from collections.abc import Iterable

from sync.base import Metadata
from sync.manifest import dtype_name, torch_dtype
from sync.source import SourcePair

logger = logging.getLogger("rollout_engine")

_SERVED = ("float32", "bfloat16")
"""Dtypes that every engine can be made with, and a trainer can be exact in."""


class CastNotice:
    """Logs a warning when weights are cast on their way to an engine, the same once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def warn_if_cast(self, pairs: Iterable[SourcePair], metadata: Metadata) -> None:
        """Warn if floating weights differ from the dtypes of `metadata`, naming the pair of dtypes of most values."""
        cast: Counter[tuple[str, str]] = Counter()
        for name, tensor in pairs:
            wanted = metadata[name][0] if name in metadata else dtype_name(tensor.dtype)
            differs = dtype_name(tensor.dtype) != wanted
            if differs and tensor.dtype.is_floating_point and torch_dtype(wanted).is_floating_point:
                cast[dtype_name(tensor.dtype), wanted] += math.prod(tensor.shape)
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
