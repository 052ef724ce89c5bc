"""Images as users give them: which are read, and what of them; which are refused, and how the error names them."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import random_picture
from rollout_engine.text.pictures import read_image

FIELD = "messages[0]['content'][1]['image']"
RED, WHITE = (255, 0, 0), (255, 255, 255)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_each_form_of_an_image_gives_the_same_pixels(tmp_path):
    image = random_picture(0)
    wanted, data = np.asarray(image), file_of(image)
    (tmp_path / "picture.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    path = tmp_path / "picture.png"
    for given in (image, wanted, torch.from_numpy(wanted.copy()), data, bytearray(data), path, str(path), url):
        read = read_image(given, FIELD)
        assert read.mode == "RGB" and np.array_equal(np.asarray(read), wanted)


def test_other_colours_become_rgb_and_what_is_transparent_white():
    red = Image.new("RGB", (8, 4), RED)
    clear = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    grey = Image.fromarray(np.full((4, 8), 0x80FF, np.uint16))
    palette = Image.new("P", (8, 4), 1)
    palette.putpalette([*WHITE, *RED])
    seen = {
        "CMYK": file_of(Image.new("CMYK", (8, 4), (0, 255, 255, 0)), "JPEG", quality=100),
        "palette": file_of(palette),
        "transparent": file_of(clear),
        "transparent palette": file_of(palette, transparency=1),
        "grey and alpha": file_of(Image.new("LA", (8, 4), (9, 0))),
        "one bit": file_of(Image.new("1", (8, 4), 1)),
        "16 bits": file_of(grey),
        "BMP": file_of(red, "BMP"),
        "WebP": file_of(red, "WEBP", lossless=True),
    }
    found = {name: read_image(data, FIELD).getpixel((3, 2)) for name, data in seen.items()}
    cmyk = found.pop("CMYK")
    assert abs(np.subtract(cmyk, RED)).max() <= 3
    assert found == dict.fromkeys(["palette", "BMP", "WebP"], RED) | dict.fromkeys(
        ["transparent", "transparent palette", "grey and alpha", "one bit"], WHITE
    ) | {"16 bits": (0x80, 0x80, 0x80)}


def test_a_photograph_is_turned_upright():
    lying = random_picture(1, 40, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    read = read_image(file_of(lying, exif=exif), FIELD)
    assert read.size == (32, 40)
    assert np.array_equal(np.asarray(read), np.rot90(np.asarray(lying), -1))


def animated() -> bytes:
    return file_of(random_picture(0), "GIF", save_all=True, append_images=[random_picture(1)])


BROKEN = bytearray(file_of(random_picture(0)))
BROKEN[60:80] = bytes(20)
BAD = {
    "broken": (bytes(BROKEN), "an image that can be decoded"),
    "cut off": (file_of(random_picture(0))[:200], "an image that can be decoded"),
    "a bomb": (png(50_000, 50_000), "of at most max_picture_pixels=67108864 pixels"),
    "a smaller bomb": (png(9_000, 9_000), "max_picture_pixels"),
    "zero pixels": (Image.new("RGB", (0, 4)), "at least one pixel"),
    "an empty array": (np.zeros((0, 4, 3), np.uint8), "at least one pixel"),
    "a line": (png(10_000, 1), "at most 200 times"),
    "animated": (animated(), "an image of one frame"),
    "SVG": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "It is an SVG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "an image in PNG"),
    "TIFF": (file_of(random_picture(0), "TIFF"), "an image in PNG"),
    "many scans": (file_of(random_picture(0), "JPEG") + b"\xff\xda" * 300, "scans"),
    "text": (b"secret words", "an image in PNG"),
    "nothing": (b"", "an image in PNG"),
    "a URL": ("https://host/picture.png", "No URL is fetched"),
    "a file's URL": ("file:///etc/hostname", "No URL is fetched"),
    "an SVG's data URL": ("data:image/svg+xml;base64,PHN2Zz4=", "SVG"),
    "a missing path": ("missing.png", "No such file"),
    "a directory": (".", "is not allowed"),
    "a device": ("/dev/zero", "the path of a regular file"),
    "floats": (np.zeros((4, 4, 3), np.float32), "an array of uint8"),
    "channels first": (np.zeros((3, 40, 40), np.uint8), "an array of uint8"),
    "32 bits": (Image.new("F", (8, 8)), "8 or 16 bits"),
    "a number": (5, "a PIL image"),
    "a dict": ({"url": "x"}, "a PIL image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_by_its_field_and_nothing_of_it_is_shown(name):
    given, words = BAD[name]
    with pytest.raises(RequestError) as caught:
        read_image(given, FIELD)
    assert caught.value.field == FIELD and words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_largest_size_is_an_option():
    assert read_image(random_picture(0, 40, 32), FIELD, max_pixels=40 * 32).size == (40, 32)
    with pytest.raises(RequestError, match="at most max_picture_pixels=1279 pixels"):
        read_image(random_picture(0, 40, 32), FIELD, max_pixels=40 * 32 - 1)


def test_a_picture_above_pillows_own_bound_is_refused_by_the_one_that_is_lower():
    """Pillow opens no file of more than twice MAX_IMAGE_PIXELS."""
    bound = 2 * Image.MAX_IMAGE_PIXELS
    with pytest.raises(RequestError, match=rf"of at most {bound} pixels, which Pillow allows \(PIL.Image.MAX_IMAGE"):
        read_image(png(50_000, 50_000), FIELD, max_pixels=2**31)
