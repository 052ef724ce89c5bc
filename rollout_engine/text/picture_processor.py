"""Makes arrays and placeholder text of images by a checkpoint's own processor, transformers' class for it.

The image processor is always the one on Pillow and numpy: the one on torchvision rounds otherwise, and bits would
depend on the packages that are installed.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture
from rollout_engine.text.kimi_patches import KimiImages, KimiPatches
from rollout_engine.text.pictures import MAX_PIXELS, describe_image, read_image
from rollout_engine.text.pixtral_rows import PixtralRows

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
"""Outputs of a processor that describe the text; the others are of the picture."""
_OWN_CLASSES: dict[str, Callable[..., Any]] = {
    "PixtralProcessor": PixtralRows,
    "Kimi_K25Processor": KimiPatches,
    "KimiK25Processor": KimiPatches,  # as published
}
"""Ours for processors that need torchvision."""
_OWN_IMAGES = {"kimi_k25": KimiImages}
"""Ours for image processors of these types of models, for the same reason."""
_SAME_TEXT = {"SmolVLMProcessor": "Idefics3Processor"}
"""A processor with the same placeholder text for usual tokens, for one that needs more packages."""
_USUAL_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}
_MAX_TEXT_CHARS = 1 << 26
"""Characters of the texts that are kept for `Picture`s."""


class ReadPicture(NamedTuple):
    """A picture that has been read and processed. Prompts take it in place of the image."""

    picture: Picture
    text: str
    """The text that stands for it: a placeholder for each feature, and the tokens that the processor adds."""


class PictureProcessor:
    """Reads images for one model. Any thread may call it; images are processed one at a time.

    Args:
        directory: files of the checkpoint.
        hf: its tokenizer, which is not changed.
        max_pixels: most pixels of an image as it is given.
        cache_bytes: most bytes of pictures that are kept, so that an image given again is not processed again.

    Raises `RequestError` if transformers cannot make the checkpoint's processor here.
    """

    def __init__(
        self, directory: Path, hf: PreTrainedTokenizerBase, *, max_pixels: int = MAX_PIXELS, cache_bytes: int = 0
    ) -> None:
        self._max_pixels, self._cache_bytes = max_pixels, cache_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, ReadPicture] = OrderedDict()
        """Digest of an image's pixels -> the picture; used last at the end."""
        self._num_known_bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a picture -> its text; read last at the end."""
        self._num_text_chars = 0
        try:
            # A processor may add tokens to its tokenizer, and sets its truncation and padding.
            self._processor = _make_processor(directory, copy.deepcopy(hf))
            self.placeholder = str(self._processor.image_token)
        except Exception as problem:  # a file that is damaged, or a package that is missing, raises anything
            reason = str(problem).strip().partition("\n")[0].removesuffix(".")
            raise RequestError(
                f"Pictures cannot be read: the processor of this checkpoint cannot be made: {reason}. Install its "
                'packages, or give pictures that are processed already: {"prompt_token_ids": ..., "pictures": [...]}.'
            ) from problem

    def read(self, value: Any, field: str) -> ReadPicture:
        """Read an image, unless it is a `ReadPicture` or the `Picture` of one. Raises `RequestError` naming `field`."""
        if isinstance(value, ReadPicture):
            return value
        if isinstance(value, Picture):
            return self._find(value, field)
        image = read_image(value, field, max_pixels=self._max_pixels)
        pixels = np.asarray(image)
        key = blake2b(pixels.data, digest_size=16, salt=_size_salt(image)).digest()
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                found = self._process(image, field)
                self._keep_text(found)
                self._num_known_bytes += found.picture.num_bytes
            self._known[key] = found
            while self._num_known_bytes > self._cache_bytes and self._known:
                self._num_known_bytes -= self._known.popitem(last=False)[1].picture.num_bytes
            return found

    def _process(self, image: Image.Image, field: str) -> ReadPicture:
        try:
            made = self._processor(
                images=[image], text=[self.placeholder], return_tensors="np", return_text_replacement_offsets=True
            )
            (written,) = made["text_replacement_offsets"][0]
        except Exception as problem:  # for example the ratio of its sides
            bound = f"an image that the model's processor takes ({problem})"
            raise RequestError.for_field(field, describe_image(image), bound) from problem
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TEXT}
        return ReadPicture(Picture.of(arrays), str(written["replacement"]))

    def _find(self, picture: Picture, field: str) -> ReadPicture:
        """Find the text of a picture that was read here before."""
        with self._lock:
            text = self._texts.get(picture.digest)
        if text is None:
            bound = "a picture that was read here, and not forgotten since"
            hint = 'Give its image, or {"prompt_token_ids": ..., "pictures": [...]}.'
            raise RequestError.for_field(field, f"a Picture of {picture.num_bytes} bytes", bound, hint)
        return ReadPicture(picture, text)

    def _keep_text(self, read: ReadPicture) -> None:
        if self._texts.pop(read.picture.digest, None) is None:
            self._num_text_chars += len(read.text)
        self._texts[read.picture.digest] = read.text
        while self._num_text_chars > _MAX_TEXT_CHARS:
            self._num_text_chars -= len(self._texts.popitem(last=False)[1])


def _size_salt(image: Image.Image) -> bytes:
    """Images of other sizes may have the same bytes."""
    return image.width.to_bytes(8, "little") + image.height.to_bytes(8, "little")


def _make_processor(directory: Path, hf: PreTrainedTokenizerBase) -> Any:
    """Make the checkpoint's processor, of which only the part for images is needed."""
    found, _ = ProcessorMixin.get_processor_dict(directory, local_files_only=True)
    images = read_image_processor(directory)
    by_type = PROCESSOR_MAPPING_NAMES.get(_type_of(directory))
    name = str(found.get("processor_class") or getattr(images, "_processor_class", None) or by_type)
    if all(getattr(hf, token, usual) == usual for token, usual in _USUAL_TOKENS.items()):
        name = _SAME_TEXT.get(name, name)
    if (own := _OWN_CLASSES.get(name)) is not None:
        return own(images, hf, found)
    base = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, ProcessorMixin)):
        raise ValueError(f"its class {name!r} is not one of transformers {transformers.__version__}")
    made: Any = type(base.__name__, (_ImagesAlone, base), {})
    parts = {"image_processor": images, "tokenizer": hf}
    return made.from_args_and_dict([parts.get(each) for each in base.get_attributes()], found)


def read_image_processor(directory: Path) -> Any:
    """Make the checkpoint's image processor, on Pillow and numpy. Raises as transformers does."""
    if (own := _OWN_IMAGES.get(_type_of(directory))) is not None:
        settings, _ = BaseImageProcessor.get_image_processor_dict(directory, local_files_only=True)
        return own(settings)
    return AutoImageProcessor.from_pretrained(directory, backend="pil", trust_remote_code=False, local_files_only=True)


def _type_of(directory: Path) -> str:
    config, _ = transformers.PreTrainedConfig.get_config_dict(directory, local_files_only=True)
    return str(config.get("model_type"))


class _ImagesAlone(ProcessorMixin):
    """Lets a processor have no part for videos and sounds, which need packages that pictures do not."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Check a part's class, if it is there."""
        return type(None) if argument is None else super().check_argument_for_proper_class(argument_name, argument)
