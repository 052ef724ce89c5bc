"""Bidirectional attention inside a vision tower, as Hugging Face modules call it.

Scores are sums in float32 by our products, the softmax is one of rows in float32, and its product with the values is
rounded once. So no number of threads changes a bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.pictures.tower_products import plain_product

TOWER_ATTENTION = "rollout_engine_pictures"
_SCORE_BYTES = 64 << 20
"""Most bytes of scores at once."""


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: q [B, H, T, D], k and v [B, Hk, S, D] -> ([B, T, H, Dv], None).

    `attention_mask`: added to the scores, or booleans of the keys to be read, [B, 1 or H, T, S]. Raises `ConfigError`
    for dropout, causal attention, windows and caps.
    """
    name = type(module).__name__
    if dropout:
        raise ConfigError(
            f"{name} drops attention weights at random (p={dropout}), which no engine does. Load the model with "
            "attention_dropout=0.0, or call model.eval()."
        )
    if is_causal or kwargs.get("softcap") or kwargs.get("sliding_window") or kwargs.get("s_aux") is not None:
        raise ConfigError(f"{name}: attention of a vision tower is bidirectional here, without windows and caps.")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch._C.DisableTorchFunction():  # each call would pass through Python otherwise
        out: Tensor = _Attention.apply(query, key, value, _additive_mask(attention_mask, query), scale)
    return out.transpose(1, 2).contiguous(), None


def _additive_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as float32 to add to scores, [B, H, T, S]."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask.float().expand(query.shape[0], query.shape[1], -1, -1)


class _Attention(torch.autograd.Function):
    """softmax(scale q k^T + mask) v of each head; the probabilities are computed again for gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.scale = mask, scale
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for place in _heads(q):
            q_head, k_head, v_head = (x[place].float() for x in (q, k, v))
            step = max(1, _SCORE_BYTES // (4 * len(k_head)))
            for first in range(0, len(q_head), step):
                rows = slice(first, first + step)
                scores = plain_product(q_head[rows], k_head).mul_(scale)
                if mask is not None:
                    scores += mask[place][rows]
                out[place][rows] = plain_product(scores.softmax(-1), v_head.t())
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for place in _heads(q):
            q_head, k_head, v_head, g = (x[place].float() for x in (q, k, v, grad))
            scores = q_head @ k_head.t() * ctx.scale
            weights = (scores if ctx.mask is None else scores + ctx.mask[place]).softmax(-1)
            of_weights = g @ v_head.t()
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * ctx.scale
            for each, found in zip(grads, (of_scores @ k_head, of_scores.t() @ q_head, weights.t() @ g), strict=True):
                each[place] = found
        return *grads, None, None


def _heads(q: Tensor) -> Iterator[tuple[int, int]]:
    return ((row, head) for row in range(q.shape[0]) for head in range(q.shape[1]))


AttentionInterface.register(TOWER_ATTENTION, tower_attention)
AttentionMaskInterface.register(TOWER_ATTENTION, eager_mask)
