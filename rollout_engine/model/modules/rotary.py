"""Rotary tables, and the length up to which rotary frequencies do not depend on the batch.

Frequencies of the kinds "dynamic" and "longrope" change for every token of a batch once its longest row, padding
included, passes the original length. Up to that length they are constant, and a row does not depend on its batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

_LEAST_ROWS = 1024
"""Positions in a table at first."""


def rotary_limit(config: PretrainedConfig) -> int | None:
    """Most positions of a batch with constant rotary frequencies; None if they never change."""
    ropes = getattr(config, "rope_parameters", None) or {}
    limits = []
    for rope in [ropes, *ropes.values()]:
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


class RotaryTable:
    """Rotary cosines and sines of positions, computed once by a Hugging Face module and looked up from then on.

    It grows with the positions that are asked for. The module computes a batch if frequencies may depend on it:
    past `limit`, the `rotary_limit`, and in a module that is not of transformers.
    """

    def __init__(self, rotary: nn.Module, limit: int | None) -> None:
        is_known = type(rotary).__module__.startswith("transformers.")
        self._rotary, self._limit = rotary, limit if is_known else 0
        self._table: tuple[Tensor, Tensor] | None = None

    def rows(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, head_dim] of positions int64 [T], in the dtype and on the device of `like`."""
        table = self.table(int(positions.max()) + 1 if len(positions) else 0, like)
        if table is None:
            return self._computed(positions, like)
        cos, sin = table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def rows_on_axes(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, head_dim] of positions on three axes, int64 [3, T]."""
        cos, sin = self._rotary(like[None], position_ids=positions[:, None])
        return cos[0], sin[0]

    def table(self, end: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [P, head_dim] of positions 0 to P - 1, P >= `end`, with the dtype and device of `like`.

        None if they may depend on the batch.
        """
        if self._limit is not None and end > self._limit:
            return None
        if self._table is None or len(self._table[0]) < end or self._table[0].dtype != like.dtype:
            size = max(_LEAST_ROWS, 1 << (end - 1).bit_length())
            size = size if self._limit is None else min(size, self._limit)
            self._table = self._computed(torch.arange(size, device=like.device), like)
        return self._table

    def _computed(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(like[None], position_ids=positions[None])
        return cos[0], sin[0]


def refuse_long_batches(model: PreTrainedModel) -> None:
    """Make a Hugging Face causal LM raise `ValueError` for batches longer than `rotary_limit`, in place."""
    limit = rotary_limit(model.config.get_text_config())
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
