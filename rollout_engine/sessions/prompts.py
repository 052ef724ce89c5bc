"""Prompts of a session's requests: new conversations, and conversations that continue behind sampled ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.sessions.forest import Turn
from rollout_engine.sessions.memory import bytes_of_value
from rollout_engine.sessions.messages import Key, Messages, digest, is_answer
from rollout_engine.text.chat_turns import ChatTurns
from rollout_engine.text.picture_processor import ReadPicture
from rollout_engine.text.picture_prompts import PicturePrompts
from rollout_engine.text.tokenizer import TextCodec

_MAX_KEPT, _MAX_KEPT_BYTES = 64, 64 << 20
_FIELD = "messages as token ids"
_OPENS = ("add_generation_prompt", "continue_final_message")


class OwnIds(msgspec.Struct):
    """The ids of a prompt behind those of the turn that it continues."""

    token_ids: list[int]
    new_messages: Messages
    shown: str
    """The template's text of the whole prompt."""
    is_raw: bool | None = None
    """Whether earlier answers stand in it as sampled; False: as clients have them; None: there are none."""
    pictures: list[PlacedPicture] = []
    """At positions in these ids."""


class ChatPrompts:
    """The prompts of conversations under one chat template, its options and tools."""

    def __init__(
        self,
        codec: TextCodec,
        options: Mapping[str, Any],
        most: int | None = None,
        pictures: PicturePrompts | None = None,
    ) -> None:
        """`options`: as in `ChatOptions`. `most`: the longest prompt, in tokens. `pictures`: None: it has none."""
        self._codec, self._options, self._most = codec, dict(options), most
        self._pictures = pictures if pictures is not None and pictures.are_served else None
        tools = self._options.get("tools")
        self.key: tuple[Key, Key] = digest(tools), digest({**self._options, "tools": None})
        """(digest of the tools, of the other options)."""
        self._tries_raw_first = True
        """Whether the form that continued the last conversation is the raw one."""
        self._turns: ChatTurns | None = None
        if not any(self._options.get(name) is not None for name in _OPENS):
            try:
                self._turns = ChatTurns(codec, **self._options)
            except RequestError:  # the template does not write answers as they are: no turn continues another
                self._turns = None

    def new(self, messages: Messages, read: Sequence[ReadPicture] = ()) -> OwnIds:
        """The prompt of a conversation, with its pictures, as the template writes it. Raises `RequestError`."""
        text = self._codec.chat_prompt(messages, **self._options)
        if self._pictures is None:
            return OwnIds(self._codec.encode(text, add_special_tokens=False, most=self._most), messages, text)
        fields = {"messages": messages, "tools": self._options.get("tools")}
        if not read:
            self._pictures.check_text(text, fields)
        expanded = self._pictures.expand_text(text, read, fields) if read else text
        token_ids = self._codec.encode(expanded, add_special_tokens=False, most=self._most)
        placed = self._pictures.place(token_ids, read, _FIELD) if read else []
        return OwnIds(token_ids, messages, text, pictures=placed)

    def text(self, messages: Messages) -> str:
        """The template's text of a conversation. Raises `RequestError`."""
        return self._codec.render_chat(messages, **self._options)

    def after(self, turn: Turn, new: Messages, read: Sequence[ReadPicture] = ()) -> OwnIds | None:
        """The ids from a turn's answer to the next one, if `new` messages, with their pictures, stand between them.

        None if the template cannot continue behind the sampled ids: it writes earlier turns differently.
        Raises `RequestError` for a text that stands for a picture.
        """
        if self._turns is None or not new:
            return None
        if self._pictures is not None:
            self._pictures.check_messages([message for message in new if not is_answer(message)])
        first = self._tries_raw_first
        for is_raw in (first, not first):
            try:
                found = self._continue(self._turns, turn, new, read, is_raw=is_raw)
            except RequestError:  # rewritten, or refused in this form
                continue
            self._tries_raw_first = is_raw
            return found
        return None

    def _continue(
        self, turns: ChatTurns, turn: Turn, new: Messages, read: Sequence[ReadPicture], *, is_raw: bool
    ) -> OwnIds:
        """The ids after a turn's answer. Raises `RequestError`.

        `is_raw`: render earlier answers as the sampled text; else as clients have them, since some templates take
        results of tools only behind an answer with calls.
        """
        answer = turns.message(turn.said) if is_raw else turn.answered.message
        assert answer is not None, "it has been recorded"
        before = _as_sampled(turns, turn) if is_raw else turn.node.messages()
        known = turn.shown  # another thread may forget it meanwhile
        is_known = turn.is_shown_raw in (is_raw, None)
        shown = known if known is not None and is_known else turns.text(before)
        now = turns.text([*before, answer, *new])
        has_ended = turn.sample.finish_reason == "stop"
        ids = turns.between(shown, now, turn.said, turn.sample.token_ids, has_ended=has_ended)
        placed: list[PlacedPicture] = []
        if read and self._pictures is not None:
            ids, placed = self._pictures.expand_ids(ids, read, _FIELD)
        return OwnIds(ids, new, now, is_raw, placed)

    def read_answer(self, token_ids: list[int]) -> str:
        """The text of an answer without its end tokens."""
        return self._codec.decode(self._codec.without_end(token_ids)) if token_ids else ""


def _as_sampled(turns: ChatTurns, turn: Turn) -> Messages:
    """The conversation of a turn's prompt, earlier answers as they were sampled."""
    found: Messages = []
    for each in turn.chain():
        found += each.new_messages
        if each is not turn:
            found.append(turns.message(each.said))
    return found


class PromptCache:
    """`ChatPrompts` by their options; making one renders several conversations."""

    def __init__(self, codec: TextCodec, most: int | None = None, pictures: PicturePrompts | None = None) -> None:
        """`most`: the longest prompt, in tokens. `pictures`: reads those of the engine; None: the model has none."""
        self._codec, self._most, self._pictures = codec, most, pictures
        self._kept: dict[Key, ChatPrompts] = {}
        self._num_bytes = 0
        """Approximate memory of the options."""

    def find(self, options: Mapping[str, Any]) -> ChatPrompts:
        """The prompts under these options. Raises `RequestError`."""
        key = digest(options)
        found = self._kept.get(key)
        if found is None:
            found = ChatPrompts(self._codec, options, self._most, self._pictures)
            self._num_bytes += bytes_of_value(options)
            if len(self._kept) >= _MAX_KEPT or self._num_bytes > _MAX_KEPT_BYTES:
                self._kept.clear()
                self._num_bytes = bytes_of_value(options)
            self._kept[key] = found
        return found
