"""Reads images as users give them: bounded before they are decoded, upright, in RGB.

An image is a `PIL.Image`, an array of uint8 in [height, width] or [height, width, 1, 3 or 4], the path of a file, the
bytes of one, or a data URL. Errors describe an image by its size, and show none of its contents.
"""

import os
import stat
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rollout_engine.base.errors import RequestError
from rollout_engine.text.data_urls import decode_data_url

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Formats of files that are read, by Pillow's names. Of the others EPS runs a program, PPM may be decoded by Python's
loops, and a damaged TIFF is taken as whole, with a line on stderr for each bad row."""
MAX_PIXELS = 64 << 20
MAX_BYTES = 64 << 20
"""Bytes of a file."""
MAX_RATIO = 200
"""Most pixels of the longer side for each of the shorter: processors that scale the shorter one make the other huge."""
_MAX_SCANS = 256
"""Passes over all blocks of a JPEG, each of which may take a few bytes of the file."""
_START_OF_SCAN = b"\xff\xda"
_REMOTE = ("http://", "https://", "file://", "ftp://")
_FORMS = "a PIL image, an array of uint8, the path or the bytes of a file, or a data URL"
_WHITE = (255, 255, 255, 255)


def read_image(value: Any, field: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read an image in RGB, turned upright by its EXIF data. Raises `RequestError` that names `field`.

    Transparent pixels become white. Files with several frames are refused: a frame is an image of its own.
    """
    image, shown = _open_image(value, field, max_pixels)
    width, height = image.size
    if not width or not height:
        raise RequestError.for_field(field, f"{width} x {height} pixels", "an image of at least one pixel")
    if width * height > max_pixels:
        bound = f"of at most max_picture_pixels={max_pixels} pixels"
        raise RequestError.for_field(field, f"{width} x {height} pixels", bound, "Make it smaller first.")
    if max(width, height) > MAX_RATIO * min(width, height):
        bound = f"an image whose longer side is at most {MAX_RATIO} times the shorter"
        raise RequestError.for_field(field, f"{width} x {height} pixels", bound)
    try:
        # In MPO, the JPEG of some cameras, the frames behind the first are depth maps or previews.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            hint = "Give its frames as images of their own (.convert('RGB') takes the current one)."
            raise RequestError.for_field(field, shown, "an image of one frame", hint)
        return _as_rgb(ImageOps.exif_transpose(image), field)
    except RequestError:
        raise
    except Exception as problem:  # the decoders of damaged files raise anything, with excerpts of the file
        raise _cannot_decode(field, shown, problem) from None


def describe_image(value: Any) -> str:
    """Describe an image for an error, without its contents."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"a file of {len(value)} bytes"
    if isinstance(value, Image.Image):
        return f"a PIL image of {value.width} x {value.height} pixels"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} in {list(value.shape)}"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return f"a {type(value).__name__}"


def _open_image(value: Any, field: str, max_pixels: int) -> tuple[Image.Image, str]:
    """Return an image that is not decoded yet, and its description for errors."""
    if isinstance(value, Image.Image):
        return value, describe_image(value)
    if isinstance(value, str) and value.startswith("data:"):
        value = decode_data_url(value, field)
    if isinstance(value, str) and value.lower().startswith(_REMOTE):
        hint = "No URL is fetched: download it, and give its path or bytes."
        raise RequestError.for_field(field, describe_image(value), _FORMS, hint)
    if isinstance(value, str | os.PathLike):
        return _open_bytes(_read_file(value, field), field, os.fspath(value), max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        return _open_bytes(bytes(value), field, describe_image(value), max_pixels)
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic | type):
        return _image_of_array(value, field), describe_image(value)
    raise RequestError.for_field(field, describe_image(value), _FORMS)


def _read_file(path: Any, field: str) -> bytes:
    """Read a regular file; a pipe or a device could block indefinitely, or never end."""
    path = os.path.expanduser(os.fspath(path))
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError.for_field(field, path, "the path of a regular file")
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as problem:
        if isinstance(problem, RequestError):
            raise
        reason = getattr(problem, "strerror", None) or str(problem)
        raise RequestError.for_field(field, path, "the path of a file that can be read", f"{reason}.") from None


def _open_bytes(data: bytes, field: str, shown: str, max_pixels: int) -> tuple[Image.Image, str]:
    if len(data) > MAX_BYTES:
        raise RequestError.for_field(field, shown, f"a file of at most {MAX_BYTES} bytes", f"It has {len(data)}.")
    if data.startswith(b"\xff\xd8") and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise RequestError.for_field(field, shown, f"a JPEG of at most {_MAX_SCANS} scans")
    try:
        return Image.open(BytesIO(data), formats=FORMATS), shown
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as problem:
        raise _too_large(field, shown, max_pixels, problem) from None
    except UnidentifiedImageError:
        hint = "It is an SVG: draw it as pixels first." if _is_svg(data) else ""
        raise RequestError.for_field(field, shown, f"an image in {', '.join(FORMATS)}", hint) from None
    except Exception as problem:
        raise _cannot_decode(field, shown, problem) from None


def _too_large(field: str, shown: str, max_pixels: int, problem: Exception) -> RequestError:
    """The error of a file that Pillow does not open for the size in its header: by our bound, unless that is higher."""
    own = Image.MAX_IMAGE_PIXELS or 0
    own *= 2 if isinstance(problem, Image.DecompressionBombError) else 1
    bound = f"of at most max_picture_pixels={max_pixels} pixels"
    if max_pixels > own:
        bound = f"of at most {own} pixels, which Pillow allows (PIL.Image.MAX_IMAGE_PIXELS={Image.MAX_IMAGE_PIXELS})"
    return RequestError.for_field(field, shown, bound, "Make it smaller first.")


def _is_svg(data: bytes) -> bool:
    return b"<svg" in data[:4096].lower()


def _cannot_decode(field: str, shown: str, problem: Exception) -> RequestError:
    hint = f"It is damaged or cut off ({type(problem).__name__})."
    return RequestError.for_field(field, shown, "an image that can be decoded", hint)


def _image_of_array(value: Any, field: str) -> Image.Image:
    """Make an image of an array or tensor."""
    bound = "an array of uint8, 0 to 255, in [height, width] or [height, width, 1, 3 or 4]"
    try:
        array = np.asarray(value)
    except Exception:  # a tensor on a device
        raise RequestError.for_field(field, describe_image(value), bound, "Give it in numpy's memory.") from None
    if array.dtype != np.uint8 or not (array.ndim == 2 or array.ndim == 3 and array.shape[2] in (1, 3, 4)):
        raise RequestError.for_field(field, describe_image(value), bound)
    if not array.size:
        raise RequestError.for_field(field, describe_image(value), "an image of at least one pixel")
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))


def _as_rgb(image: Image.Image, field: str) -> Image.Image:
    """Decode an image into RGB, its transparent pixels on white, as transformers does."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        hint = "Bring its values to 8 bits first."
        raise RequestError.for_field(field, f"an image of mode {image.mode!r}", "an image of 8 or 16 bits", hint)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")
