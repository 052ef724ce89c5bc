"""Images of pictures as a model sees them, for people to look at: the inverse of an image processor.

Processors make a picture smaller, divide its colours by 255, subtract a mean, divide by a deviation, and may cut it
into patches or tiles. Of the usual means and deviations those are taken that give whole colours again; if none does,
the darkest value becomes black and the brightest white.
"""

import io
import math

import numpy as np
from PIL import Image

from rollout_engine.base.pictures import Picture

_SCALES = (
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
)
"""(mean, deviation) of red, green and blue."""
_TOLERANCE = 0.02
"""Largest distance of a colour from a whole one, of rounding in float32."""
_COLOURS = 3
_FORMS = ("image_grid_thw", "image_position_ids", "image_sizes")
"""Arrays with the places of `pixel_values` in a picture."""
_FRAMES = (2, 1)
"""Frames of one patch: Qwen's towers read pictures as films of two equal frames."""
_MERGED = 2
"""Rows and columns of patches that become one feature in Qwen's towers, if the number of features is not known."""


def png_of(picture: Picture, num_features: int | None = None) -> bytes | None:
    """A picture as the bytes of a PNG file; None if its arrays are of a form that is not known here.

    `num_features`: tokens that the picture takes in its prompt, if known.
    """
    pixels = _pixels(picture, num_features)
    if pixels is None:
        return None
    file = io.BytesIO()
    Image.fromarray(_colours(pixels)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _pixels(picture: Picture, num_features: int | None) -> np.ndarray | None:
    """Values [H, W, 3] as the tower gets them; of several tiles the one that shows the whole picture."""
    values, grid, places, sizes = map(picture.arrays.get, ("pixel_values", *_FORMS))
    if values is None or not values.size:
        return None
    if values.ndim == 2 and grid is not None and grid.shape == (1, 3):
        frames, rows, columns = map(int, grid[0])
        return _join_patches(values, frames, rows, columns, num_features)
    if values.ndim == 4 and grid is not None and grid.shape == (1, 3):
        return _join_squares(values, *map(int, grid[0, 1:]))
    if places is not None and places.shape == (1, *values.shape[1:2], 2) and values.ndim == 3:
        return _place_patches(values[0], places[0])
    if values.ndim > 3:
        is_first = values.ndim == 5 and sizes is not None  # LLaVA-NeXT
        values = values.reshape(-1, *values.shape[-3:])[0 if is_first else -1]
        sizes = None if is_first else sizes
    if values.ndim != 3 or values.shape[0] != _COLOURS:
        return None
    if sizes is not None and sizes.shape == (1, 2):  # the rest is padding
        values = values[:, : max(1, int(sizes[0, 0])), : max(1, int(sizes[0, 1]))]
    return values.transpose(1, 2, 0)


def _join_patches(
    values: np.ndarray, frames: int, rows: int, columns: int, num_features: int | None
) -> np.ndarray | None:
    """Put patches [frames * rows * columns, D] of Qwen's processors together; only the first frame."""
    num_patches = frames * rows * columns
    merged = math.isqrt(num_patches // num_features) if num_features else _MERGED
    if not merged or rows % merged or columns % merged or len(values) != num_patches:
        return None
    for depth in _FRAMES:
        side = math.isqrt(values.shape[1] // (_COLOURS * depth))
        if side and side * side * _COLOURS * depth == values.shape[1]:
            blocks = frames, rows // merged, columns // merged, merged, merged, _COLOURS, depth, side, side
            first = values.reshape(blocks)[0, :, :, :, :, :, 0]
            return first.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, _COLOURS)
    return None


def _join_squares(values: np.ndarray, rows: int, columns: int) -> np.ndarray | None:
    """Put patches [rows * columns, C, side, side] of Kimi's processor together."""
    if len(values) != rows * columns or values.shape[1] != _COLOURS:
        return None
    height, width = (number * side for number, side in zip((rows, columns), values.shape[2:], strict=True))
    squares = values.reshape(rows, columns, *values.shape[1:])
    return squares.transpose(0, 3, 1, 4, 2).reshape(height, width, _COLOURS)


def _place_patches(values: np.ndarray, places: np.ndarray) -> np.ndarray | None:
    """Put patches [n, D] of Gemma 4's processor at their columns and rows [n, 2], which are -1 for padding."""
    side, is_real = math.isqrt(values.shape[1] // _COLOURS), (places >= 0).all(1)
    columns, rows = (places[is_real].max(0, initial=0) + 1).tolist()
    if columns * rows != is_real.sum() or side * side * _COLOURS != values.shape[1]:
        return None
    pixels = np.zeros((rows, columns, side, side, _COLOURS), values.dtype)
    pixels[places[is_real, 1], places[is_real, 0]] = values[is_real].reshape(-1, side, side, _COLOURS)
    return pixels.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, _COLOURS)


def _colours(pixels: np.ndarray) -> np.ndarray:
    """Colours uint8 [H, W, 3] of normalised values."""
    values = np.nan_to_num(pixels.astype(np.float64))
    for mean, deviation in _SCALES:
        colours = (values * deviation + mean) * 255
        if np.abs(colours - colours.round()).max() < _TOLERANCE and colours.min() > -1 and colours.max() < 256:
            return np.asarray(colours.round(), np.uint8)
    low, high = values.min(), values.max()
    spread = (values - low) / (high - low or 1.0)
    return np.asarray((spread * 255).round(), np.uint8)
