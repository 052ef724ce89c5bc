"""Uniform random numbers that depend on (seed, position) alone.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11): a keyed bijection of
128-bit counters. There is no state to save, so a preempted, replayed or moved sequence draws the same numbers. 32-bit
words are held in int64 tensors: a product of two may wrap, but its low 64 bits, all that is used, are right.
"""

import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build, sampling

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) per row, with 53 random bits. `seeds` and `positions` are int64 [N].

    The key is the seed (its bit pattern, unsigned), the counter is the position.
    """
    if build.load_kernels() is not None:
        return sampling.uniforms(seeds, positions)
    zeros = torch.zeros_like(positions)
    words = philox4x32(torch.stack([*_words(positions), zeros, zeros]), torch.stack(_words(seeds)))
    return ((words[0] << 21) + (words[1] >> 11)).double() * 2.0**-53


def philox4x32(counters: Tensor, keys: Tensor) -> Tensor:
    """Ten rounds of Philox. `counters` int64 [4, N] and `keys` int64 [2, N] hold 32-bit words; returns words [4, N]."""
    multipliers, weyl = (torch.tensor(pair, device=keys.device)[:, None] for pair in (_MULTIPLIERS, _WEYL))
    even, odd = counters[0::2], counters[1::2]
    for i in range(_ROUNDS):
        crossed = (even * multipliers).flip(0)
        even, odd = (crossed >> 32 & _WORD) ^ odd ^ (keys + i * weyl & _WORD), crossed & _WORD
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits."""
    return x & _WORD, x >> 32 & _WORD
