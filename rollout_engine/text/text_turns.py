"""Prompts of an episode's later turns for a tokenizer without a chat template: text is appended as it is."""

from collections.abc import Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.text.chat_rendering import text_of
from rollout_engine.text.picture_parts import holds_pictures
from rollout_engine.text.picture_processor import ReadPicture
from rollout_engine.text.tokenizer import TextCodec


class TextTurns:
    """The prompts of episodes in plain text, as `ChatTurns` gives those of conversations."""

    needs_messages = False

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def text(self, messages: Sequence[dict[str, Any]]) -> str:
        """All that was said. Raises `RequestError` for a message that is neither read nor an answer."""
        for message in messages:
            if message["role"] not in ("user", "assistant"):
                bound = "'user' for a tokenizer without a chat template, to which everything is plain text"
                raise RequestError.for_field("role", message["role"], bound, "Or give chat_template=...")
        return "".join(text_of(message["content"]) for message in messages)

    def begin(self, messages: Sequence[dict[str, Any]], text: str) -> list[int]:
        """Token ids of `text(messages)` as a prompt, with the tokenizer's special tokens. Raises `RequestError`."""
        return self._codec.encode(text)

    def read_pictures(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ReadPicture]]:
        """The messages as they are, and no pictures. Raises `RequestError` for messages with one."""
        if holds_pictures(messages):
            hint = "Or give chat_template=..., which writes a placeholder for each picture."
            raise RequestError.for_field("messages", "a picture", "text for a tokenizer without a chat template", hint)
        return messages, []

    def place_pictures(
        self, token_ids: list[int], pictures: Sequence[ReadPicture]
    ) -> tuple[list[int], list[PlacedPicture]]:
        """The ids as they are: there are no pictures."""
        return token_ids, []

    def check_pictures(self, pictures: Sequence[PlacedPicture], token_ids: Sequence[int]) -> None:
        """Nothing to check: there are no pictures."""

    def message(self, text: str) -> dict[str, Any]:
        """The message of an answer."""
        return {"role": "assistant", "content": text}

    def between(self, shown: str, now: str, said: str, sampled: Sequence[int], *, has_ended: bool = True) -> list[int]:
        """Token ids of the text between an answer and the next one. Raises `RequestError`."""
        text = now[len(shown) + len(said) :]
        return self._codec.encode(text, add_special_tokens=False) if text else []

    def rewriting(self, roles: Sequence[str]) -> None:
        """Nothing rewrites plain text."""
