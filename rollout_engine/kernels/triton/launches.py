"""Launches of Triton kernels that examine their arguments once, not at every launch.

`kernel[grid](...)` looks at each argument, prints the options and looks up the kernel compiled for them: 15 to 45 us of
the host's time, 200 times in a step that no CUDA graph replays, which is longer than the device computes. Here a kernel
is found by the values of its arguments, except those that do not change its code: addresses (only whether they are
multiples of 16 does) and numbers that it declares with `do_not_specialize`.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

from rollout_engine.kernels.triton.rounding import INTERPRETED

Arrange = Callable[[Sequence[Any], tuple[int, ...], tuple[Any, ...]], tuple[Any, ...]]
"""From pointers (tensors or addresses), free numbers and the rest to a kernel's arguments."""

_IS_TESTED = triton.__version__.startswith("3.6.") and not INTERPRETED.value
"""Whether this Triton's kernels take the arguments passed here (tests/unit/kernels/triton/test_launches.py)."""
_ALIGNMENT = 16
"""Bytes of which Triton compiles for a multiple or for any address."""
_dtype = attrgetter("dtype")


def in_order(pointers: Sequence[Any], free: tuple[int, ...], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pointers first, then free numbers, then the rest."""
    return (*pointers, *free, *rest)


class Launcher:
    """Launches one kernel. Profilers that hook into Triton see first launches only; those of torch and CUDA see all."""

    def __init__(self, kernel: Any, arrange: Arrange = in_order, **options: Any) -> None:
        """`arrange` makes the kernel's arguments, constants included; `options` are of every launch."""
        self._kernel, self._arrange, self._options = kernel, arrange, options
        self._compiled: dict[Hashable, Any] = {}

    def launch(
        self,
        grid: tuple[int, ...],
        pointers: Sequence[Tensor],
        free: tuple[int, ...],
        rest: tuple[Hashable, ...],
        **options: Hashable,
    ) -> None:
        """Launch on the current stream. `free` numbers are those that the kernel declares with `do_not_specialize`.

        The tensors are on one device. The rest, numbers and constants, should be the same in most launches: each value
        is an entry of its own here.
        """
        addresses = list(map(Tensor.data_ptr, pointers))
        device = pointers[0].get_device()
        key = rest, *options.values(), *map(_dtype, pointers), _aligned(addresses), device
        found = self._compiled.get(key)
        if found is None:
            arguments = self._arrange(pointers, free, rest)
            made = self._kernel[grid](*arguments, **self._options, **options)
            if _IS_TESTED:
                self._compiled[key] = _Compiled(made)
            return
        arguments = self._arrange(addresses, free, rest)
        found.launch(*(*grid, 1, 1)[:3], driver.active.get_current_stream(device), *found.constants, *arguments)


class _Compiled:
    """Parameters of the C function that launches a compiled kernel, besides the grid, the stream and the arguments."""

    def __init__(self, kernel: Any) -> None:
        run = kernel.run
        assert not run.global_scratch_size and not run.profile_scratch_size, "no kernel here uses scratch memory"
        flags, scratch, hooks = (run.launch_cooperative_grid, run.launch_pdl), (None, None), (None, None)
        self.launch = run.launch
        self.constants = kernel.function, *flags, *scratch, kernel.packed_metadata, None, *hooks


def _aligned(addresses: list[int]) -> bool | tuple[bool, ...]:
    """Whether all addresses are aligned, or each."""
    union = 0
    for address in addresses:
        union |= address
    return union % _ALIGNMENT == 0 or tuple(address % _ALIGNMENT == 0 for address in addresses)
