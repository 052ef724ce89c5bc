"""The features of one picture, by transformers' own forward of a vision tower in which products are ours.

Engine and trainer call the same function, for one picture at a time, so they have the same bits.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.composites import NoText, TextPart
from rollout_engine.model.pictures.tower_attention import TOWER_ATTENTION
from rollout_engine.model.pictures.tower_products import TowerArithmetic


class PictureFeatures(NamedTuple):
    """The rows that one picture puts in the place of embeddings, n for its n placeholder tokens."""

    rows: Tensor
    """[n, H]."""
    deepstack: list[Tensor]
    """[n, H] each: added to the hidden states behind the first decoder layers; empty in most models."""


def make_tower_exact(composite: PreTrainedModel, make_row_invariant: Callable[[nn.Module], None]) -> None:
    """Give the parts of a composite other than its text model our products and attention, in place.

    `make_row_invariant`: that of the device's `Arithmetic`. Parameters and their names stay. Calling it twice is
    harmless.
    """
    own = [composite.config, composite.config.get_text_config()]
    for part in picture_parts(composite):
        make_row_invariant(part)
        for child in part.modules():
            config = getattr(child, "config", None)
            if isinstance(config, PretrainedConfig) and not any(config is each for each in own):
                config._attn_implementation = TOWER_ATTENTION


def picture_parts(composite: nn.Module) -> list[nn.Module]:
    """The modules of a composite that hold nothing of its text model, the outermost of each.

    The text model may have been removed.
    """
    return list(_parts_without(composite, _text_of(composite)))


def loose_parameters(composite: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name that belong to no part: those of modules around the text model (LLaVA-NeXT's line ends)."""
    text = _text_of(composite)
    return {
        f"{path}.{name}".lstrip("."): parameter
        for path, child in composite.named_modules()
        if id(child) not in text and any(id(each) in text for each in child.modules())
        for name, parameter in child.named_parameters(recurse=False)
    }


def _text_of(composite: nn.Module) -> set[int]:
    """Ids of the modules that are the text model, or stand in its place."""
    text = {id(child) for child in composite.modules() if isinstance(child, NoText)}
    if not text:
        part = TextPart.of(composite)
        text = {id(part.decoder), id(part.head)}
    return text


def _parts_without(module: nn.Module, text: set[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if id(child) in text:
            continue
        if any(id(each) in text for each in child.modules()):
            yield from _parts_without(child, text)
        else:
            yield child


def encode_picture(owner: nn.Module, arrays: Mapping[str, Tensor]) -> PictureFeatures:
    """The features of one picture: `arrays` as `base.pictures.Picture` has them.

    `owner`: a composite, or its parts without text, behind `make_tower_exact`. Gradients reach its parameters.
    Tiles that the processor has cut a picture into are encoded one by one, so their features do not depend on which of
    them a trainer takes for one picture. Raises `ConfigError` for arrays that transformers does not take as a picture.
    """
    taken = _arguments(owner)
    given = {name: value for name, value in arrays.items() if name in taken}
    try:
        with TowerArithmetic():
            rows, deepstack = zip(*(_encode_tile(owner, each) for each in _tiles_of(given)), strict=True)
            return PictureFeatures(torch.cat(rows), [torch.cat(layer) for layer in zip(*deepstack, strict=True)])
    except ConfigError:
        raise
    except Exception as problem:  # foreign modules may fail in any way
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in arrays.items())
        raise ConfigError(
            f"{type(owner).__name__} does not take this picture ({shapes}): {type(problem).__name__}: {problem}"
        ) from problem


def _encode_tile(composite: Any, arrays: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    found = composite.get_image_features(**arrays, return_dict=True)
    deepstack = getattr(found, "deepstack_features", None) or ()
    return _all_rows(found.pooler_output), [_all_rows(each) for each in deepstack]


def _tiles_of(arrays: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tiles of a picture: `pixel_values` [tiles, C, H, W] or [1, tiles, C, H, W]; any other is whole.

    So are tiles that come with `image_sizes`: their features are put together to rows of the picture (LLaVA-NeXT). And
    patches [patches, C, H, W] with `image_grid_thw` are no tiles (Kimi K2.5).
    """
    pixels = arrays.get("pixel_values")
    dim = -1 if pixels is None else pixels.dim() - 4
    if pixels is None or dim not in (0, 1) or (dim == 1 and "image_sizes" in arrays) or "image_grid_thw" in arrays:
        return [arrays]
    of_each = pixels.shape[: dim + 1]
    return [
        {name: x.narrow(dim, i, 1).clone() if x.shape[: dim + 1] == of_each else x for name, x in arrays.items()}
        for i in range(pixels.shape[dim])
    ]


def _arguments(owner: nn.Module) -> set[str]:
    """Names of the arrays that features are computed from; processors return others, for videos and for text."""
    methods = (getattr(type(child), "get_image_features", None) for child in owner.modules())
    return {name for method in methods if method is not None for name in inspect.signature(method).parameters}


def _all_rows(found: Any) -> Tensor:
    """Features as rows [n, H], from one tensor [..., H] or several."""
    if isinstance(found, Tensor):
        return found.reshape(-1, found.shape[-1])
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])
