"""Pictures of prompts: their images are read, and placeholders become one for each feature.

    text or conversation       one placeholder a picture ──> the processor's text for it ──> token ids
    token ids                  one placeholder a picture ──> the ids of that text; or they are expanded already
    token ids and "pictures"   expanded and processed: nothing is read

A text of a user that contains a placeholder is refused: it would stand for a picture.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import RequestError
from rollout_engine.base.locations import find_directory
from rollout_engine.base.pictures import Picture, PictureInfo, PlacedPicture
from rollout_engine.text.picture_parts import images_of, is_picture, with_images
from rollout_engine.text.picture_processor import PictureProcessor, ReadPicture
from rollout_engine.text.pictures import describe_image
from rollout_engine.text.tokenizer import TextCodec


class PicturePrompts:
    """Reads the pictures of the prompts of one engine.

    Args:
        codec: the tokenizer; None with `skip_tokenizer_init`.
        info: how the model takes pictures; None if it takes none.
        make_processor: makes the checkpoint's processor, when the first image arrives. May raise `RequestError`. None
            if the model takes no pictures.
        max_pictures: most pictures of one prompt.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        info: PictureInfo | None,
        make_processor: Callable[[], PictureProcessor] | None = None,
        *,
        max_pictures: int = 0,
    ) -> None:
        self._codec, self._info, self._make_processor = codec, info, make_processor
        self.max_pictures = max_pictures
        """Most pictures of one prompt."""
        self._lock = threading.Lock()
        self._made: PictureProcessor | RequestError | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, codec: TextCodec | None, info: PictureInfo | None) -> Self:
        """Make the reader of one engine."""
        if codec is None:
            return cls(None, info, max_pictures=config.max_prompt_pictures)

        def make_processor() -> PictureProcessor:
            directory = find_directory(config.model, weights=False)
            sizes: Any = dict(max_pixels=config.max_picture_pixels, cache_bytes=config.mm_cache_bytes)
            return PictureProcessor(directory, codec.hf, **sizes)

        return cls(codec, info, make_processor, max_pictures=config.max_prompt_pictures)

    @property
    def are_served(self) -> bool:
        """Whether the model takes pictures."""
        return self._info is not None and not self._info.unsupported_reason

    @property
    def processor(self) -> PictureProcessor:
        """The checkpoint's processor. Raises `RequestError` if it cannot be made, which is tried once."""
        assert self._make_processor is not None, "the caller has checked that pictures are served"
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._make_processor()
                except RequestError as problem:
                    self._made = problem
        if isinstance(self._made, RequestError):
            raise RequestError(*self._made.args)
        return self._made

    def read_all(self, given: Sequence[tuple[str, Any]]) -> list[ReadPicture]:
        """Read the images of a prompt, (field, image) each. Raises `RequestError` naming the field."""
        if not given:
            return []
        self._require_served(given[0][0])
        self._require_few(given[0][0], len(given))
        if self._codec is None:
            hint = 'Or give pictures that are processed already: {"prompt_token_ids": ..., "pictures": [...]}.'
            bound = "absent: the engine has no tokenizer (skip_tokenizer_init=True)"
            raise RequestError.for_field(given[0][0], describe_image(given[0][1]), bound, hint)
        return [self.processor.read(image, field) for field, image in given]

    def read_prompt(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a prompt (`as_fields`) with `ReadPicture`s in place of images. Raises `RequestError`."""
        read = self.read_all(images_in(fields))
        if not read:
            return dict(fields)
        if "messages" in fields:
            kept = {name: value for name, value in fields.items() if name != "multi_modal_data"}
            return {**kept, "messages": with_images(fields["messages"], read)}
        return {**fields, "multi_modal_data": {"image": read}}

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RequestError`, naming the part, if a text in messages contains a placeholder."""
        if self.are_served:
            self._refuse_marks({"messages": messages}, self._marks)

    def check_text(self, text: str, fields: Mapping[str, Any]) -> None:
        """Raise `RequestError`, naming the part, if the text of a prompt without pictures has a placeholder."""
        if self.are_served and any(mark in text for mark in self._marks):
            self._refuse_marks(fields, self._marks)
            kind = "prompt" if "prompt" in fields else "messages"
            mark = next(mark for mark in self._marks if mark in text)
            bound = "a text without placeholders, or with a picture for each"
            raise RequestError.for_field(kind, f"{text.count(mark)} of {mark!r} and no picture", bound)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Warn of placeholders in the token ids of a prompt without pictures: they are tokens like any other."""
        if self.are_served and self._codec is not None and self._image_token_id in token_ids:
            self._codec.warn_once(
                f"A prompt of token ids has the id {self._image_token_id}, which stands for a picture, and no picture: "
                "it is a token like any other. Give multi_modal_data or pictures if pictures were meant."
            )

    def expand_text(self, text: str, read: Sequence[ReadPicture], fields: Mapping[str, Any]) -> str:
        """Write the processor's text of each picture in place of its placeholder. Raises `RequestError`.

        `text`: a prompt, or a conversation as the chat template writes it, with one placeholder for each picture.
        """
        placeholder = self.processor.placeholder
        if "messages" in fields:
            self._refuse_marks(fields, {*self._marks, placeholder})
        elif self._image_token != placeholder and self._image_token in text:  # Gemma 3 expands one into the other
            bound = f"a text without {self._image_token!r}: a picture is {placeholder!r}, once"
            raise RequestError.for_field("prompt", f"{text.count(self._image_token)} of it", bound)
        before, *parts = text.split(placeholder)
        if len(parts) != len(read):
            kind = "messages" if "messages" in fields else "prompt"
            whose = "the chat template writes" if "messages" in fields else "the text has"
            bound = f"one placeholder {placeholder!r} for each picture: {whose} {len(parts)}"
            raise RequestError.for_field(kind, f"pictures: {len(read)}", bound)
        return before + "".join(each.text + part for each, part in zip(read, parts, strict=True))

    def place(self, token_ids: Sequence[int], read: Sequence[ReadPicture], field: str) -> list[PlacedPicture]:
        """The places of pictures in expanded token ids. Raises `RequestError` unless all placeholders are theirs."""
        positions = [i for i, each in enumerate(token_ids) if each == self._image_token_id]
        counts = [each.text.count(self._image_token) for each in read]
        if sum(counts) != len(positions):
            bound = f"as many as the pictures have (id {self._image_token_id}): {sum(counts)}"
            raise RequestError.for_field(field, f"placeholders: {len(positions)}", bound)
        placed, first = [], 0
        for count, each in zip(counts, read, strict=True):
            placed.append(PlacedPicture(positions[first], positions[first + count - 1] + 1, each.picture))
            first += count
        return placed

    def expand_ids(
        self, token_ids: Sequence[int], pictures: Sequence[ReadPicture | Picture], field: str = "prompt_token_ids"
    ) -> tuple[list[int], list[PlacedPicture]]:
        """Expand one placeholder for each picture in token ids, unless they are expanded already.

        Returns (token ids, places). A `Picture` must have been read here. Raises `RequestError`.
        """
        read = [self.processor.read(each, f"pictures[{i}]") for i, each in enumerate(pictures)]
        texts = [self._encode(each.text) for each in read]
        if self._are_expanded(token_ids, texts):
            return list(token_ids), self.place(token_ids, read, field)
        (single,) = self._encode(self.processor.placeholder)[:1] or [-1]
        num_placeholders = sum(each in (single, self._image_token_id) for each in token_ids)
        if num_placeholders != len(read) or token_ids.count(single) != len(read):
            num_features = sum(each.count(self._image_token_id) for each in texts)
            bound = f"as many as pictures (id {single}): {len(read)}, or expanded: {num_features}"
            raise RequestError.for_field(field, f"placeholders: {num_placeholders}", bound)
        rest = iter(texts)
        expanded = [one for each in token_ids for one in (next(rest) if each == single else (each,))]
        return expanded, self.place(expanded, read, field)

    def check_placed(self, pictures: Any, token_ids: Sequence[int]) -> list[PlacedPicture]:
        """Check the places of processed pictures in token ids. Raises `RequestError` naming the picture."""
        if not isinstance(pictures, list | tuple):
            raise RequestError.for_field("pictures", describe_image(pictures), "a list of PlacedPicture")
        if pictures:
            self._require_served("pictures")
            self._require_few("pictures", len(pictures))
        end = 0
        for index, each in enumerate(pictures):
            field = f"pictures[{index}]"
            _check_picture(each, field)
            if not end <= each.start < each.end <= len(token_ids):
                bound = f"behind the picture before it, which ends at {end}, and within {len(token_ids)} tokens"
                raise RequestError.for_field(field, f"[{each.start}, {each.end})", bound)
            end = each.end
            if {token_ids[each.start], token_ids[end - 1]} != {self._image_token_id}:
                bound = f"a span whose first and last token are placeholders (id {self._image_token_id})"
                raise RequestError.for_field(field, f"[{each.start}, {each.end})", bound)
        return list(pictures)

    @cached_property
    def _image_token_id(self) -> int:
        assert self._info is not None, "the caller has checked that pictures are served"
        return self._info.image_token_id

    @cached_property
    def _image_token(self) -> str:
        """Text of the token that stands for one feature."""
        assert self._codec is not None, "the caller has checked that there is a tokenizer"
        return str(self._codec.hf.convert_ids_to_tokens(self._image_token_id))

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        """Texts that stand for pictures: of the placeholder, and of the token that some tokenizers begin one with."""
        begins = getattr(self._codec.hf, "boi_token", None) if self._codec is not None else None
        return (self._image_token, begins) if isinstance(begins, str) else (self._image_token,)

    def _encode(self, text: str) -> list[int]:
        assert self._codec is not None, "the caller has checked that there is a tokenizer"
        return self._codec.encode(text, add_special_tokens=False)

    def _are_expanded(self, token_ids: Sequence[int], texts: Sequence[Sequence[int]]) -> bool:
        """Whether token ids contain all placeholders of these pictures, and the tokens between them."""
        ids, image = list(token_ids), self._image_token_id
        positions = [i for i, each in enumerate(ids) if each == image]
        counts = [text.count(image) for text in texts]
        if sum(counts) != len(positions):
            return False
        first = 0
        for text, count in zip(texts, counts, strict=True):
            lead = text.index(image)
            inner = text[lead : len(text) - text[::-1].index(image)]
            begin = positions[first]
            if ids[begin : begin + len(inner)] != inner:
                return False
            # One placeholder may be a whole picture's: it is expanded if the tokens around it are there.
            if len(positions) == len(texts) and ids[max(begin - lead, 0) :][: len(text)] != text:
                return False
            first += count
        return True

    def _require_served(self, field: str) -> None:
        if self._info is None:
            raise RequestError.for_field(field, "a picture", "absent: the model takes no pictures")
        if self._info.unsupported_reason:
            reason = self._info.unsupported_reason
            raise RequestError.for_field(field, "a picture", "absent: pictures are not served", reason)

    def _require_few(self, field: str, count: int) -> None:
        if count > self.max_pictures:
            bound = f"in a prompt of at most max_prompt_pictures={self.max_pictures}"
            raise RequestError.for_field(field, f"one of {count} pictures", bound)

    def _refuse_marks(self, fields: Mapping[str, Any], marks: Sequence[str] | set[str]) -> None:
        """Raise `RequestError` for the first text of a user that contains a placeholder."""
        for name in ("prompt", "messages", "tools", "chat_template_kwargs"):
            for field, text in _texts(fields.get(name), name):
                for mark in marks:
                    if mark in text:
                        bound = f"a text without {mark!r}, which stands for a picture"
                        hint = "Give its image in multi_modal_data." if name == "prompt" else ""
                        raise RequestError.for_field(field, text, bound, hint)


def _check_picture(placed: Any, field: str) -> None:
    """Raise `RequestError` unless this is a placed picture whose arrays a processor may have made."""
    if not isinstance(placed, PlacedPicture) or not isinstance(placed.picture, Picture):
        raise RequestError.for_field(field, describe_image(placed), "a PlacedPicture")
    if type(placed.start) is not int or type(placed.end) is not int:
        raise RequestError.for_field(field, f"[{placed.start!r}, {placed.end!r})", "a span of two ints")
    digest, arrays = placed.picture.digest, placed.picture.arrays
    if not isinstance(digest, bytes) or len(digest) != 16 or not isinstance(arrays, dict) or not arrays:
        raise RequestError.for_field(field, "a Picture", "a picture of Picture.of(arrays)")
    for name, array in arrays.items():
        kinds = "f" if name == "pixel_values" else "biuf"
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.dtype == np.float16:
            bound = "an array of float32 or float64" + ("" if kinds == "f" else ", ints or bools")
            raise RequestError.for_field(f"{field}.arrays[{name!r}]", describe_image(array), bound)


def refuse_pictures(fields: Mapping[str, Any], bound: str) -> None:
    """Raise `RequestError` that names the first picture of a prompt (`as_fields`), if it has any. `bound`: the rule."""
    fields_of_pictures = [field for field, _ in images_in(fields)]
    if fields_of_pictures or fields.get("pictures"):
        raise RequestError.for_field([*fields_of_pictures, "pictures[0]"][0], "a picture", bound)


def images_in(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(field, image) of the pictures of a prompt (`as_fields`), in order. Raises `RequestError`; no image is opened."""
    listed = _images_of_data(fields.get("multi_modal_data"))
    if "messages" not in fields:
        return listed
    rest, found = iter(listed), []
    for field, image in images_of(fields["messages"]):
        given = (field, image) if image is not None else next(rest, None)
        if given is None:
            bound = f"an image, or one more of multi_modal_data['image'], which has {len(listed)}"
            raise RequestError.for_field(field, None, bound)
        found.append(given)
    if (left := next(rest, None)) is not None:
        bound = "absent: the messages have no more pictures without an image ({'type': 'image'})"
        raise RequestError.for_field(left[0], describe_image(left[1]), bound)
    return found


def _images_of_data(data: Any) -> list[tuple[str, Any]]:
    """(field, image) of a prompt's "multi_modal_data"."""
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise RequestError.for_field("multi_modal_data", describe_image(data), "a dict, {'image': [...]}")
    for name in data:
        if name != "image":
            hint = "Give frames of a video as images." if name == "video" else "Audio is not served."
            raise RequestError.for_field("multi_modal_data", name, "'image' alone", hint)
    images = data.get("image")
    if images is None:
        return []
    if not isinstance(images, list) and type(images) is not tuple:
        return [("multi_modal_data['image']", images)]
    return [(f"multi_modal_data['image'][{i}]", image) for i, image in enumerate(images)]


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of all texts in a value, keys included; images are left out."""
    if isinstance(value, str):
        yield field, value
    elif is_picture(value):
        return
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(name, field)
            yield from _texts(each, f"{field}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _texts(each, f"{field}[{index}]")
