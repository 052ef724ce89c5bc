"""Memory on the host for the next values of weights. Copies are done when they return."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import psutil
from torch import Tensor, UntypedStorage


class CpuShadowMemory:
    """Satisfies `backend.ShadowMemory`; pages are taken as they are written."""

    @property
    def num_free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def allocate(self, num_bytes: int) -> UntypedStorage:
        return UntypedStorage(num_bytes)

    def beside_steps(self) -> AbstractContextManager[object]:
        return nullcontext()  # the host runs everything at once

    def prepare_copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        def copy() -> None:
            for source, target in pairs:
                target.copy_(source)

        return copy
