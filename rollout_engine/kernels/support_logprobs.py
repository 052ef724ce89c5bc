"""Log-probs of tokens among some of the vocabulary: those that truncation and masks had left to the draw.

Of a row only the tokens of its support count, for the maximum and for the total. All others have weight 0 in the sums
of `token_logprobs`, in the chunks of the whole row: a draw from these tokens sums the same numbers in the same order. A
row with an empty support has all tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollout_engine.kernels.cpu import build, sampling
from rollout_engine.kernels.cpu.arguments import argument_error
from rollout_engine.kernels.row_stats import RowStats, TokenSets
from rollout_engine.kernels.token_logprobs import row_temperatures, token_logprobs


def support_logprobs(logits: Tensor, token_ids: Tensor, temperature: float, support: TokenSets) -> Tensor:
    """Log-probs of `token_ids` int64 [N] among the tokens of `support` -> float32 [N], differentiable.

    `logits` [N, V] of any floating dtype, on the CPU. Gradients of tokens outside are 0. A row with NaN or +inf in its
    support, or nothing but -inf, gives NaN. The caller has checked that ids are in [0, V) and ascend within each row.
    Raises `ValueError` for a support of another number of rows.
    """
    if len(support.starts) != len(logits) + 1:
        raise argument_error("support.starts", support.starts, f"of {len(logits) + 1} places for {len(logits)} rows")
    if build.load_kernels() is None:
        return token_logprobs(_mask_logits(logits, support), token_ids, temperature)
    result: Tensor = _SupportLogprobs.apply(
        logits, token_ids.long(), row_temperatures(temperature, logits), support.starts, support.ids
    )
    return result


def _mask_logits(logits: Tensor, support: TokenSets) -> Tensor:
    """`logits` as float32, -inf outside of the support."""
    counts = support.starts.diff()
    is_in = torch.zeros(logits.shape, dtype=torch.bool)
    is_in[torch.arange(len(logits)).repeat_interleave(counts), support.ids.long()] = True
    return logits.float().masked_fill(~is_in & (counts > 0)[:, None], -torch.inf)


class _SupportLogprobs(torch.autograd.Function):
    """Backward: (onehot - softmax over the support) / temperature * grad."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor, starts: Tensor, ids: Tensor
    ) -> Tensor:
        stats = sampling.score(logits, temperatures, token_ids, TokenSets(starts, ids))
        ctx.save_for_backward(logits, temperatures, starts, ids, *stats)
        return stats.logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, temperatures, starts, ids, *saved = ctx.saved_tensors
        support = TokenSets(starts, ids)
        return sampling.gradient(logits, temperatures, RowStats(*saved), grad, support), None, None, None, None
