"""Pictures in the content of messages: the parts that hold them, and messages without images for chat templates.

    {"type": "image", "image": ...}    {"type": "image_url", "image_url": {"url": "data:..."}}

`{"type": "image"}` alone is a picture of the prompt's "multi_modal_data".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.text.pictures import describe_image

_KEYS = {"image": "image", "image_url": "image_url", "input_image": "image_url"}
"""Type of a part -> the key of its image. The last is that of OpenAI's responses."""
_INSTEAD = "url", "path", "base64"
_NOT_READ = {"type", "detail", "uuid"}
"""Further keys of a part, of OpenAI and vLLM; none changes a prompt."""
_OTHER_MEDIA = {
    "video": "Videos are not served: give frames as images.",
    "video_url": "Videos are not served: give frames as images.",
    "audio": "Audio is not served.",
    "input_audio": "Audio is not served.",
    "audio_url": "Audio is not served.",
}


def is_picture(part: Any) -> bool:
    """Whether a part of a message's content is one of a picture."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _KEYS


def holds_pictures(prompt: Any) -> bool:
    """Whether a prompt may hold images: a look at its form, before it is checked."""
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data") is not None:
            return True
        prompt = prompt.get("messages", prompt.get("prompt"))
    if not (_is_list(prompt) and prompt and isinstance(prompt[0], Mapping)):
        return False
    contents: list[Any] = [each.get("content") for each in prompt if isinstance(each, Mapping)]
    return any(_is_list(content) and any(map(is_picture, content)) for content in contents)


def as_picture_part(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a part whose image may be read. Raises `RequestError` for a wrong form; the image itself is not opened."""
    kind = part["type"]
    key = _KEYS[kind]
    given = [name for name, value in part.items() if value is not None]  # columns of datasets have all keys
    other = next((name for name in given if name != key and name not in _NOT_READ), None)
    if other is not None:
        is_image = key == "image" and other in _INSTEAD
        decides = "The checkpoint's files alone set how a picture is processed."
        hint = "Give the image, its path, its bytes or a data URL as 'image'." if is_image else decides
        raise RequestError.for_field(f"{field}[{other!r}]", describe_image(part[other]), "absent", hint)
    if key == "image":
        return {"type": kind} if part.get("image") is None else {"type": kind, "image": part["image"]}
    held = part.get(key)
    url = held.get("url") if isinstance(held, Mapping) else held
    detail = held.get("detail") if isinstance(held, Mapping) else None
    if detail not in (None, "auto", "high"):
        raise RequestError.for_field(f"{field}[{key!r}]['detail']", detail, "'auto', 'high' or left out")
    if isinstance(url, str) and not url.startswith("data:"):
        hint = "No URL is fetched: give {'type': 'image', 'image': ...} with a path or bytes."
        raise RequestError.for_field(f"{field}[{key!r}]", describe_image(url), "a data URL (data:image/...)", hint)
    if url is None:
        raise RequestError.for_field(f"{field}[{key!r}]", describe_image(held), "a data URL, {'url': 'data:...'}")
    return {"type": kind, key: url}


def hint_of_other_part(kind: Any) -> str:
    """A sentence on parts of this type, which hold no picture and are not served."""
    return _OTHER_MEDIA.get(kind, "") if isinstance(kind, str) else ""


def images_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (field, image) of the pictures in messages that `as_messages` returned; None for one that is not there."""
    for i, j, part in _picture_parts(messages):
        key = _KEYS[part["type"]]
        yield f"messages[{i}]['content'][{j}][{key!r}]", part.get(key)


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages with other images in their pictures, in order."""
    made = [dict(message) for message in messages]
    for (i, j, part), image in zip(list(_picture_parts(messages)), images, strict=True):
        content = list(made[i]["content"])
        content[j] = {"type": part["type"], _KEYS[part["type"]]: image}
        made[i]["content"] = content
    return made


def without_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a chat template is shown them: of a picture, that it is there."""
    if not any(True for _ in _picture_parts(messages)):
        return list(messages)
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [{"type": "image"} if is_picture(each) else each for each in message["content"]]}
        for message in messages
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _picture_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for i, message in enumerate(messages):
        content = message["content"]
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if is_picture(part):
                yield i, j, part
