"""Checks of the parts of bodies: each refusal names the part's place."""

from collections.abc import Collection, Mapping
from typing import Any

from rollout_engine.base.errors import RequestError, unknown_name
from rollout_engine.text.picture_processor import ReadPicture

ABSENT: tuple[Any, ...] = (None, False, [], {})


def as_object(value: Any, field: str, bound: str = "an object") -> dict[str, Any]:
    """A value that has to be an object. Raises `RequestError`."""
    if not isinstance(value, dict):
        raise RequestError.for_field(field, value, bound)
    return value


def as_list(value: Any, field: str) -> list[Any]:
    """A value that has to be a list. Raises `RequestError`."""
    if not isinstance(value, list):
        raise RequestError.for_field(field, value, "a list")
    return value


def as_text(value: Any, field: str) -> str:
    """A value that has to be a text. Raises `RequestError`."""
    if not isinstance(value, str):
        raise RequestError.for_field(field, value, "a text")
    return value


def check_keys(
    given: Mapping[str, Any], field: str, known: Collection[str], ignored: Collection[str] = (), of: str = "key"
) -> None:
    """Raise `RequestError` for a key that is neither known nor ignored, and whose value asks for something."""
    for name, value in given.items():
        if name not in known and name not in ignored and value not in ABSENT:
            place = f"{field}[{name!r}]" if field else name
            raise RequestError(f"{place}: {unknown_name(of, name, known)}", field=place, value=value)


def choose(value: Any, field: str, allowed: Collection[str], hint: str = "") -> str:
    """A value that has to be one of these words. Raises `RequestError`."""
    if not isinstance(value, str) or value not in allowed:
        raise RequestError.for_field(field, value, " or ".join(map(repr, allowed)), hint)
    return value


def as_picture(value: Any, field: str) -> dict[str, Any]:
    """The part of a message with a picture that was read. Raises `RequestError` for anything else."""
    if not isinstance(value, ReadPicture):
        raise RequestError.for_field(field, type(value).__name__, "a picture")
    return {"type": "image", "image": value}
