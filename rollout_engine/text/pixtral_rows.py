"""Placeholder text of Pixtral and Mistral 3, whose class of transformers needs torchvision.

A picture is rows of placeholders, each row with a break behind it, and the last with an end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerBase


class PixtralRows:
    """Stands in for `PixtralProcessor`.

    Args:
        image_processor: the checkpoint's.
        hf: its tokenizer, which has the tokens.
        options: contents of processor_config.json.
    """

    def __init__(self, image_processor: Any, hf: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self._images = image_processor
        self._patch_size = int(options.get("patch_size", 16)) * int(options.get("spatial_merge_size", 1))
        self.image_token = str(options.get("image_token", "[IMG]"))
        self._break = str(options.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(options.get("image_end_token", "[IMG_END]"))
        for token in (self.image_token, self._break, self._end):
            if token not in hf.get_vocab():
                raise ValueError(f"the tokenizer has no token {token!r}")

    def __call__(self, images: Sequence[Image.Image], text: Sequence[str], **options: Any) -> dict[str, Any]:
        """Process one image: its arrays, and the text that stands for it."""
        made = self._images(images, patch_size=self._patch_size, return_tensors=options.get("return_tensors"))
        ((height, width),) = made["image_sizes"].tolist()
        row = self.image_token * (width // self._patch_size) + self._break
        rows = row * (height // self._patch_size)
        written = {"replacement": rows.removesuffix(self._break) + self._end}
        return {**made, "text_replacement_offsets": [[written]]}
