"""Warns that a trainer's 16-bit weights hardly move."""

import logging
from collections.abc import Iterable

from torch import Tensor

from sync.source import SourcePair

logger = logging.getLogger("rollout_engine")

_LEAST_SHARE = 0.05


class ChangeNotice:
    """Logs a warning, once, if an update changes almost nothing of weights that are trained in 16 bits."""

    trainer_has_masters = False
    """Whether an optimizer of this process keeps float32 masters: then no notice warns."""

    def __init__(self) -> None:
        self._was_logged = False

    def warn_if_hardly_changed(self, pairs: Iterable[SourcePair], share: float) -> None:
        """Warn if `share` of the trained weights, more than none, changed, and most of all are plain, of 16 bits.

        Weights that are cast for the engine are not: their masters may have changed before the cast ones do.
        """
        if self._was_logged or self.trainer_has_masters or not 0 < share < _LEAST_SHARE:
            return
        total = low = 0
        for _, tensor in pairs:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                total += tensor.numel()
                low += tensor.numel() if tensor.itemsize == 2 else 0
        if low > total / 2:
            self._was_logged = True
            logger.warning(
                "The update changed %.2g %% of the weights, which the trainer holds in 16 bits: a step below half the "
                "distance to the next number is lost, unless the optimizer has float32 masters. rollout_engine."
                "float32_masters(optimizer) keeps some.",
                100 * share,
            )
