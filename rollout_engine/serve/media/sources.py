"""Finds the pictures that the body of a request names: each by a text, in whose place the picture is put.

messages            parts {"type": "image_url", "image_url": {"url": TEXT}}; "image_url" may be TEXT, and "type"
                    "input_image"; or {"type": "image", "image": TEXT}
multi_modal_data    {"image": TEXT, or a list of such}
image_data          TEXT, a list of such, or a list of these for each prompt; each may be {"url": TEXT}
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

from rollout_engine.base.errors import RequestError

PART_KINDS = ("image_url", "input_image", "image")
"""Types of parts of a conversation that hold a picture."""
_DETAILS = (None, "auto", "high")
"""Values of OpenAI's `detail` that change nothing: the checkpoint's processor alone decides the size."""
_KEYS = ("type", "image", "image_url", "url", "detail", "uuid")
"""Keys that parts may have. A `uuid`, by which vLLM finds pictures in its cache, changes nothing."""
_TEXT_FORM = "a text: a data URL, or an http(s) or file URL that the server allows"


class Source(NamedTuple):
    """A picture that a body names."""

    text: str
    put: Callable[[Any], None]
    """Puts the picture in place of the text."""
    field: str
    """Its place in the body."""
    is_base64: bool = False
    """Whether a text that is no URL is base64, as in SGLang's dialect."""


def sources_of(body: Any) -> list[Source]:
    """The pictures of a body. Raises `RequestError` for one that is not named by a text."""
    find_pictures = getattr(body, "find_pictures", None)  # of a dialect whose parts have a form of their own
    if find_pictures is not None:
        return list(find_pictures())
    return [
        *_in_messages(getattr(body, "messages", None)),
        *_in_multi_modal_data(getattr(body, "multi_modal_data", None)),
        *_in_image_data(body),
    ]


def _in_messages(messages: Any) -> Iterator[Source]:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in PART_KINDS:
                yield source_of_part(part, f"messages[{i}]['content'][{j}]")


def source_of_part(part: dict[str, Any], field: str) -> Source:
    """The picture of a part of one of `PART_KINDS`. Raises `RequestError`."""
    key = "image" if part["type"] == "image" else "image_url"
    _check_keys(part, field)
    value, field = part.get(key), f"{field}['{key}']"
    if isinstance(value, dict) and key == "image_url":
        _check_keys(value, field)
        part, key, value = value, "url", value.get("url")
    return _source(value, partial(setitem, part, key), field)


def _check_keys(part: Mapping[str, Any], field: str) -> None:
    """Raise `RequestError` for an option of a picture that would have no effect, such as its size."""
    if part.get("detail") not in _DETAILS:
        raise RequestError.for_field(f"{field}['detail']", part["detail"], "'auto', 'high' or left out")
    for name, value in part.items():
        if name not in _KEYS and value is not None:
            bound = "absent: the checkpoint's processor alone decides how a picture is read"
            raise RequestError.for_field(f"{field}['{name}']", value, bound)


def _in_multi_modal_data(data: Any) -> Iterator[Source]:
    if data is None:
        return
    if not isinstance(data, dict) or set(data) - {"image"}:
        kinds = ", ".join(data) if isinstance(data, dict) else data
        hint = "Video and audio are not served."
        raise RequestError.for_field("multi_modal_data", kinds, 'an object {"image": [TEXT, ...]}', hint)
    yield from _in_list(data, "image", "multi_modal_data['image']")


def _in_image_data(body: Any) -> Iterator[Source]:
    value = getattr(body, "image_data", None)
    if not isinstance(value, list):
        if value is not None:
            yield _in_item(value, partial(setattr, body, "image_data"), "image_data")
        return
    for i, item in enumerate(value):
        if isinstance(item, list):
            for j, each in enumerate(item):
                yield _in_item(each, partial(setitem, item, j), f"image_data[{i}][{j}]")
        elif item is not None:
            yield _in_item(item, partial(setitem, value, i), f"image_data[{i}]")


def _in_item(item: Any, put: Callable[[Any], None], field: str) -> Source:
    """One of SGLang's pictures; {"url": TEXT} becomes the picture alone."""
    if isinstance(item, Mapping):
        _check_keys(item, field)
        item = item.get("url")
    return _source(item, put, field, is_base64=True)


def _in_list(container: dict[str, Any], key: str, field: str) -> Iterator[Source]:
    value = container.get(key)
    if not isinstance(value, list):
        container[key] = value = [] if value is None else [value]
    for i, each in enumerate(value):
        yield _source(each, partial(setitem, value, i), f"{field}[{i}]")


def _source(value: Any, put: Callable[[Any], None], field: str, *, is_base64: bool = False) -> Source:
    if not isinstance(value, str) or not value:
        raise RequestError.for_field(field, value, _TEXT_FORM)
    return Source(value, put, field, is_base64)
