"""The kernels of one kind of device for layers that keep a state."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class TokenKernel(NamedTuple):
    """A function over the tokens of `StateChunks`, and its gradients for sequences from their start."""

    run: Callable[..., Tensor]
    find_gradients: Callable[..., tuple[Tensor | None, ...]]


class StateKernels(NamedTuple):
    """Kernels with the arguments of those in `kernels.cpu`."""

    recurrence: TokenKernel
    convolution: TokenKernel
    normalise: Callable[[Tensor, float], Tensor]
    """`kernels.recurrence.l2_normalised`, without gradients."""
