"""Pictures in the messages of an environment: each becomes the bytes of an image file, which any process can be sent.

A part of a message's content is a picture in the forms of a prompt: {"type": "image", "image": ...} or OpenAI's
{"type": "image_url", "image_url": {"url": "data:..."}}. Paths are refused, and so are other URLs: no file and no host
is read for an environment.
"""

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.text.data_urls import decode_data_url
from rollout_engine.text.picture_parts import as_picture_part, is_picture
from rollout_engine.text.pictures import describe_image, read_image

MAX_PICTURE_BYTES = 1 << 25
"""Bytes of the image files of one observation."""
_BOUND = "a PIL image, an array of uint8, the bytes of a file, or a data URL"


def as_picture_bytes(content: Sequence[Any], field: str) -> list[Any]:
    """The parts of a message's content, pictures as {"type": "image", "image": bytes}. Raises `RequestError`."""
    return [_as_part(part, f"{field}[{i}]") if is_picture(part) else part for i, part in enumerate(content)]


def num_picture_bytes(content: Any) -> int:
    """Bytes of the pictures in a message's content that `as_picture_bytes` returned; 0 for a text."""
    parts = content if isinstance(content, list) else ()
    return sum(len(part["image"]) for part in parts if is_picture(part))


def _as_part(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    read = as_picture_part(part, field)
    [(key, image)] = [(key, value) for key, value in read.items() if key != "type"] or [("image", None)]
    return {"type": "image", "image": _as_bytes(image, f"{field}[{key!r}]")}


def _as_bytes(image: Any, field: str) -> bytes:
    if isinstance(image, str) and image.startswith("data:"):
        return decode_data_url(image, field)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if image is None or isinstance(image, str | os.PathLike):
        hint = "No file is read for an environment: let it give the image itself."
        raise RequestError.for_field(field, describe_image(image), _BOUND, hint)
    file = BytesIO()
    read_image(image, field).save(file, "PNG", compress_level=1)
    return file.getvalue()
