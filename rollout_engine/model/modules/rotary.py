"""The length up to which rotary frequencies do not depend on the batch.

Frequencies of the kinds "dynamic" and "longrope" change for every token of a batch once its longest row, padding
included, passes the original length. Up to that length they are constant, and a row does not depend on its batch.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig


def rotary_limit(config: PretrainedConfig) -> int | None:
    """Most positions of a batch with constant rotary frequencies; None where they never change."""
    ropes = getattr(config, "rope_parameters", None) or {}
    limits = []
    for rope in [ropes, *ropes.values()]:
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def refuse_long_batches(model: nn.Module) -> None:
    """Make a Hugging Face causal LM raise `ValueError` for batches longer than `rotary_limit`, in place."""
    limit = rotary_limit(model.config)
    if limit is None:
        return

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_positions = _num_positions(args, kwargs)
        if num_positions > limit:
            raise ValueError(
                f"This batch has {num_positions} positions, padding included, and an exact model of this kind reads at "
                f"most {limit}: beyond its original length the rotary frequencies of all tokens depend on the longest "
                "row of their batch. Shorten the sequences; exact.token_logprobs cuts off padding by itself."
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


def _num_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The largest position of a call + 1, by its `position_ids` [B, T], else its `input_ids` or `inputs_embeds`."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.numel():
        return int(positions.max()) + 1
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    return tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 0
