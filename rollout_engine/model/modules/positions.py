"""The number of positions of a model, and those at which its configuration may change its computation."""

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from rollout_engine.model.modules.rotary import rotary_limit

_LEAST_BOUNDARY = 32
"""Smaller numbers lie within any trial's near positions."""
_FARTHEST = 1 << 24
"""Every integer up to it is a float32."""


def position_limit(config: PretrainedConfig) -> int | None:
    """Most positions of a sequence that do not depend on the batch; None if the configuration has no limit."""
    limits = (getattr(config, "max_position_embeddings", None), rotary_limit(config))
    return min((limit for limit in limits if limit), default=None)


def far_starts(config: PretrainedConfig, num_tokens: int, *, end: int = _FARTHEST) -> list[int]:
    """First positions of `num_tokens` tokens that reach across every boundary a configuration may name, ascending.

    A boundary is any whole number in it, whatever its name: windows, chunks, original lengths, floors of scales. The
    last start is that of the model's last tokens. `end`: all positions are below it.
    """
    limit = min(position_limit(config) or _FARTHEST, end)
    last = limit - num_tokens
    boundaries = {number for number in _numbers(config.to_dict()) if _LEAST_BOUNDARY <= number < limit}
    starts = {min(boundary - num_tokens // 2, last) for boundary in boundaries}
    return sorted(start for start in starts | {last} if start > 0)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers in a value of a configuration, at any depth."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        yield int(value)
