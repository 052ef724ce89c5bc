"""Pictures of TRL's prompts as prompts of the engine, and those of its batches as inputs of exact log-probs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rollout_engine.base.errors import ConfigError

_BY_ROW = ("mm_token_type_ids", "token_type_ids")
_BY_IMAGE = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
"""Arrays of images. "pixel_values" of Qwen's towers has a row for each patch of one."""


def group_prompts(
    token_ids: Sequence[list[int]], images: Sequence[list[Any] | None] | None
) -> list[tuple[dict[str, Any], int]]:
    """(prompt, number of completions) of prompts as TRL repeats them, token ids whose placeholders are expanded.

    Equal prompts in a row are one, if their images are equal too.
    """
    rows = zip(token_ids, [each or [] for each in images or [None] * len(token_ids)], strict=True)
    return [(_prompt(*row), len(list(same))) for row, same in itertools.groupby(rows)]


def picture_inputs(given: Mapping[str, Any], start: int, end: int, num_rows: int) -> dict[str, Tensor]:
    """The model's inputs of rows [start, end), of those that TRL passes for all `num_rows` rows of a batch.

    Raises `ConfigError` for inputs that are not known here.
    """
    inputs = {name: value for name, value in given.items() if value is not None and name != "num_images"}
    if unknown := [name for name in inputs if name not in (*_BY_ROW, *_BY_IMAGE)]:
        raise ConfigError(f"ExactLogprobs computes models of texts and images, and the batch has {', '.join(unknown)}.")
    counts: list[int] = given.get("num_images") or [0] * num_rows
    images = slice(sum(counts[:start]), sum(counts[:end]))
    return {
        name: value[slice(start, end) if name in _BY_ROW else _span_of(name, inputs, images, sum(counts))]
        for name, value in inputs.items()
    }


def _prompt(token_ids: list[int], images: list[Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return prompt | ({"multi_modal_data": {"image": images}} if images else {})


def _span_of(name: str, inputs: Mapping[str, Tensor], images: slice, num_images: int) -> slice:
    """The rows of an input that are those of these images."""
    grid, num_rows = inputs.get("image_grid_thw"), len(inputs[name])
    if name == "pixel_values" and grid is not None:
        ends = [0, *grid.prod(dim=1).cumsum(0).tolist()]
        return slice(ends[images.start], ends[images.stop])
    if num_rows != num_images:
        raise ConfigError(
            f"ExactLogprobs expects a row of {name} for each of {num_images} images, and it has {num_rows}."
        )
    return images
