"""Pictures in the messages of a session: the server has read them, and a session keeps each different one once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture, shift_pictures
from rollout_engine.sessions.memory import Memory
from rollout_engine.text.picture_parts import images_of, is_picture
from rollout_engine.text.picture_processor import ReadPicture
from rollout_engine.text.pictures import describe_image


class SessionPictures:
    """The different pictures of one session."""

    def __init__(self, memory: Memory) -> None:
        """`memory`: counts their bytes."""
        self._memory = memory
        self._kept: dict[bytes, Picture] = {}

    def read(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[ReadPicture]]]:
        """(messages with each picture as {"type": "image", "image": Picture}, the pictures of each message).

        Pictures that are kept already are the objects that are kept. Raises `RequestError` for a part without a
        picture that was read.
        """
        if not any(_holds_picture(message) for message in messages):
            return list(messages), [[] for _ in messages]
        shown, found = [], []
        for index, message in enumerate(messages):
            read = [self._keep_once(image, f"messages[{index}]") for _, image in images_of([message])]
            shown.append(_with_pictures(message, read) if read else message)
            found.append(read)
        return shown, found

    def num_new_bytes(self, pictures: Iterable[Picture]) -> int:
        """Bytes of the pictures that are not kept yet, each different one once."""
        new = {each.digest: each.num_bytes for each in pictures if each.digest not in self._kept}
        return sum(new.values())

    def keep(self, pictures: Iterable[Picture]) -> None:
        """Keep the pictures of messages that were answered."""
        for each in pictures:
            if each.digest not in self._kept:
                self._kept[each.digest] = each
                self._memory.add(each.num_bytes)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def _keep_once(self, image: Any, field: str) -> ReadPicture:
        if not isinstance(image, ReadPicture):
            hint = "Give it as a data URL, or as a URL of a host in --allow-media."
            raise RequestError.for_field(field, describe_image(image), "a picture with its image", hint)
        return ReadPicture(self._kept.get(image.picture.digest, image.picture), image.text)


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of messages that `SessionPictures.read` returned, in order."""
    return [image for _, image in images_of(list(messages)) if isinstance(image, Picture)]


def place_after(first: Sequence[PlacedPicture], second: Sequence[PlacedPicture], start: int) -> list[PlacedPicture]:
    """Pictures of ids, and behind them those of ids that begin at position `start`."""
    return [*first, *shift_pictures(second, start)] if second else list(first)


def name_pictures(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the digest of each picture, in hexadecimal digits, in its place."""
    return [_with_names(message) if _holds_picture(message) else message for message in messages]


def _holds_picture(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_picture, content))


def _with_pictures(message: Mapping[str, Any], read: Sequence[ReadPicture]) -> dict[str, Any]:
    rest = iter(read)
    content = [_part(next(rest).picture) if is_picture(each) else each for each in message["content"]]
    return {**message, "content": content}


def _part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def _with_names(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [_with_name(each) if is_picture(each) else each for each in message["content"]]}


def _with_name(part: Mapping[str, Any]) -> dict[str, Any]:
    image = part.get("image")
    return _part(image.digest.hex() if isinstance(image, Picture) else None)
