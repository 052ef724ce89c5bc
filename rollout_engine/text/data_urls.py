"""Reads pictures that are written in base64, alone or as data URLs."""

import base64

from rollout_engine.base.errors import RequestError

DATA_URL_FORM = "data:image/png;base64,iVBORw0..."
_WHITESPACE = b" \t\r\n"


def decode_data_url(url: str, field: str) -> bytes:
    """The bytes of a data URL such as "data:image/png;base64,iVBORw0...". Raises `RequestError` naming the field."""
    head, comma, text = url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    if not comma or options[-1:] != ["base64"]:
        raise RequestError.for_field(field, head, f"a data URL in base64, as {DATA_URL_FORM}")
    if kind.startswith("image/svg"):
        hint = "An SVG is a drawing without pixels: render it first."
        raise RequestError.for_field(field, head, "a picture of pixels (PNG, JPEG, WebP, ...)", hint)
    if kind not in ("", "application/octet-stream") and not kind.startswith("image/"):
        raise RequestError.for_field(field, head, f"a data URL of a picture, as {DATA_URL_FORM}")
    return decode_base64(text, field)


def decode_base64(text: str, field: str) -> bytes:
    """The bytes of a picture in base64, which may have line breaks. Raises `RequestError` naming the field."""
    try:
        found = base64.b64decode(text.encode("ascii").translate(None, _WHITESPACE), validate=True)
    except ValueError as problem:
        reason = "a character is not ASCII" if isinstance(problem, UnicodeError) else problem
        bound = "the bytes of a picture in standard base64, with padding"
        raise RequestError.for_field(field, f"{len(text)} characters", bound, f"It cannot be read: {reason}.") from None
    if not found:
        raise RequestError.for_field(field, "0 bytes", "a picture in base64, not empty")
    return found
