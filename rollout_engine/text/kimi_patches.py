"""Pictures of Kimi K2.5, whose classes of transformers need torchvision.

An image is made smaller if it has too many patches, never larger, padded with black on the right and below to whole
features, and cut into patches. Its text is a placeholder for each feature.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

_USUAL: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 14,
    "merge_size": 2,
    "max_patches": 16384,
}
"""Settings by transformers' names, with the values of its class for those that a file lacks."""
_PUBLISHED = {"merge_size": "merge_kernel_size", "max_patches": "in_patch_limit", "max_side": "patch_limit_on_one_side"}
"""The names that published files have for them, below "media_proc_cfg"."""
_MAX_SIDE = 512
_FIXED: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "fixed_output_tokens": None,
}
"""Settings that have one value here; 3 is Pillow's number of bicubic interpolation."""


class KimiImages:
    """Stands in for `Kimi_K25ImageProcessor`.

    Args:
        settings: contents of preprocessor_config.json, as transformers writes it or as it is published.

    Raises `ValueError` for settings that are not read.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        published = settings.get("media_proc_cfg") or {}
        found = _USUAL | {name: settings[name] for name in _USUAL if settings.get(name) is not None}
        for name in (*_USUAL, "max_side"):
            if (value := published.get(_PUBLISHED.get(name, name))) is not None:
                found[name] = value
        for name, value in _FIXED.items():
            if (given := settings.get(name, published.get(name, value))) != value:
                raise ValueError(f"its setting {name} is {given!r}, and {value!r} is read")
        size = settings.get("size") or {}
        self._max_side = int(found.get("max_side") or size.get("max_height") or _MAX_SIDE)
        self._mean, self._deviation = (np.asarray(found[name], np.float32) for name in ("image_mean", "image_std"))
        self._patch, self._max_patches = int(found["patch_size"]), int(found["max_patches"])
        self.merge_size = int(found["merge_size"])
        """Rows and columns of patches that become one feature."""

    def __call__(self, images: Image.Image | Sequence[Image.Image], **options: Any) -> dict[str, np.ndarray]:
        """Arrays of images in RGB: pixel_values float32 [n, 3, P, P] of their patches, row by row; image_grid_thw."""
        found = [self._cut(each) for each in ([images] if isinstance(images, Image.Image) else images)]
        grids = np.array([[1, *each.shape[:2]] for each in found], np.int64)
        pixels = np.concatenate([each.reshape(-1, *each.shape[2:]) for each in found])
        return {"pixel_values": pixels, "image_grid_thw": grids}

    def _cut(self, image: Image.Image) -> np.ndarray:
        """The patches of an image, float32 [rows, columns, 3, P, P]."""
        shown = np.asarray(image.resize(self._fit(image.width, image.height), Image.Resampling.BICUBIC), np.float32)
        unit = self._patch * self.merge_size
        padded = np.pad(shown, ((0, -shown.shape[0] % unit), (0, -shown.shape[1] % unit), (0, 0)))
        values = (padded * np.float32(1 / 255) - self._mean) / self._deviation
        rows, columns = (size // self._patch for size in values.shape[:2])
        return values.reshape(rows, self._patch, columns, self._patch, 3).transpose(0, 2, 4, 1, 3)

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """The sides of an image within the limits, before it is padded."""
        most = self._max_side * self._patch
        num_patches = max(1, width // self._patch) * max(1, height // self._patch)
        scale = min(1.0, math.sqrt(self._max_patches / num_patches), most / width, most / height)
        return min(most, max(1, int(width * scale))), min(most, max(1, int(height * scale)))


class KimiPatches:
    """Stands in for `Kimi_K25Processor`.

    Args:
        images: the checkpoint's.
        hf: its tokenizer, which has the placeholder.
        options: contents of processor_config.json.
    """

    def __init__(self, images: KimiImages, hf: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self._images = images
        self.image_token = str(getattr(hf, "image_token", None) or "<|media_pad|>")
        if self.image_token not in hf.get_vocab():
            raise ValueError(f"the tokenizer has no token {self.image_token!r}")

    def __call__(self, images: Sequence[Image.Image], text: Sequence[str], **options: Any) -> dict[str, Any]:
        """Process one image: its arrays, and the text that stands for it."""
        made = self._images(images)
        num_features = int(made["image_grid_thw"].prod()) // self._images.merge_size**2
        return {**made, "text_replacement_offsets": [[{"replacement": self.image_token * num_features}]]}
