"""Checks a trainer's batch of token ids and brings it to the form that models read."""

import torch
from torch import Tensor, nn

from rollout_engine.kernels.cpu.arguments import argument_error, check_ids, is_integral
from rollout_engine.model.modules.text_head import vocabulary_of


def token_batch(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (ids int64 [B, T], 0 at padding; mask bool [B, T], True at tokens).

    Ids may have any integer dtype; padding may be any number, -100 for example. A mask is bool, or ones and zeros.
    Raises `ValueError` that names the argument, the expected and the given value.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not is_integral(input_ids) or input_ids.is_meta:
        raise argument_error("input_ids", input_ids, "a tensor of token ids (integers) [B, T]")
    if not input_ids.numel():
        raise argument_error("input_ids", input_ids, "of at least one token")
    ids = input_ids.long()
    if attention_mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    else:
        mask = _as_bool(attention_mask, ids)
        ids = ids.masked_fill(~mask, 0)
    vocabulary = vocabulary_of(model)
    if ids.is_cpu and vocabulary is not None:  # checking on a device would wait for it
        check_ids("input_ids", ids, vocabulary, of="the rows of the model's embedding")
    return ids, mask


def _as_bool(mask: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.device != ids.device:
        raise argument_error("attention_mask", mask, f"a tensor {list(ids.shape)} on {ids.device} like input_ids")
    result = mask.bool()
    if mask.is_floating_point() and bool((mask != result).any()):
        raise ValueError(
            "attention_mask should hold ones where tokens are and zeros where padding is, and holds "
            f"{float(mask.min())}: that is a mask to be added to attention scores."
        )
    return result
