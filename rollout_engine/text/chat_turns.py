"""Prompts of a conversation's later turns, as token ids in which sampled ids stay as they were sampled.

    prompt of the next turn = this turn's prompt + the sampled ids + glue
    glue                    = the template's end of the answer, the new messages, the header of the next answer

To render the conversation anew and encode it again would give other ids for the same text. And a template may render
earlier answers differently from how they were sampled, for example without their thinking: then the sum above is not
the template's own prompt, and `ChatTurns.between` raises `RewrittenTurns`. It compares the template's texts of the
conversation at hand, since templates look at the messages: Qwen3's keeps thinking if tool messages follow, and drops
it if a user's do.

Texts and glue have one placeholder for each picture; `place_pictures` expands those of new ids.
"""

import re
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any, Unpack

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.text.conversations import ChatOptions, as_messages
from rollout_engine.text.picture_parts import holds_pictures, images_of, with_images
from rollout_engine.text.picture_processor import ReadPicture
from rollout_engine.text.picture_prompts import PicturePrompts
from rollout_engine.text.tokenizer import TextCodec

Messages = list[dict[str, Any]]

_ANSWER = "An answer: 0f1e2d3c."
"""Stands for the sampled text. No other text of a conversation contains it."""
_THINKING = "Let me see.\n</think>\n\n"
_NUM_TURNS = 3
_EXCERPT = 60
"""Characters shown on either side of a difference."""


class RewrittenTurns(RequestError):
    """The chat template writes earlier turns differently from how they were sampled; `how` shows the difference."""

    def __init__(self, how: str) -> None:
        super().__init__(f"The chat template rewrites what was sampled: {how}.", field="chat_template")
        self.how = how


class ChatTurns:
    """The prompts of conversations under one chat template and its options."""

    needs_messages = True
    """Whether a turn needs messages to answer."""

    def __init__(
        self, codec: TextCodec, pictures: PicturePrompts | None = None, **options: Unpack[ChatOptions]
    ) -> None:
        """`pictures`: of the engine; None: messages have none.

        Raises `RequestError` if there is no chat template, or it does not write an answer as it is.
        """
        self._codec, self._pictures, self._options = codec, pictures, options
        self._rewriting: dict[tuple[str, ...], str | None] = {}
        self._base = [_message("user"), {"role": "assistant", "content": _ANSWER}]
        closed = self._render(self._base, opens=False)
        if closed.count(_ANSWER) != 1:
            what = f"The chat template does not write an answer as it is: {_ANSWER!r} becomes {closed!r}"
            raise RequestError(f"{what}. Give chat_template= with one that does.", field="chat_template")
        self._base_text = closed[: closed.index(_ANSWER) + len(_ANSWER)]
        self.closing = closed[len(self._base_text) :]
        """The end of an answer that is the last message."""
        self._is_split = self._begins_with_a_token(self.closing)
        """Whether the text after an answer is encoded to the same ids without the text before it."""
        self._opening = self._unwritten_opening()

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to the header of its next answer. Raises `RequestError`."""
        return self.begin(messages, self.text(messages))

    def text(self, messages: Messages) -> str:
        """The template's text of a conversation, up to the header of its next answer. Raises `RequestError`."""
        return self._render(as_messages(messages))

    def begin(self, messages: Messages, text: str) -> list[int]:
        """Token ids of `text(messages)` as a prompt. Raises `RequestError`, also for tools that it does not show."""
        self._codec.require_shown_tools(text, as_messages(messages), **self._options)
        return self._codec.encode(text, add_special_tokens=False)

    def read_pictures(self, messages: Messages) -> tuple[Messages, list[ReadPicture]]:
        """Read the images of new messages: (the messages with a `Picture` for each, the pictures in order).

        Raises `RequestError` for an image that cannot be read, for a text that stands for one, and if the model takes
        no pictures.
        """
        if self._pictures is not None:
            self._pictures.check_messages(messages)
        if not holds_pictures(messages):
            return messages, []
        checked = as_messages(messages)
        if self._pictures is None:
            raise RequestError("These messages have pictures, and here only text is read.", field="messages")
        read = self._pictures.read_all(list(images_of(checked)))
        return with_images(checked, [each.picture for each in read]), read

    def place_pictures(
        self, token_ids: list[int], pictures: Sequence[ReadPicture]
    ) -> tuple[list[int], list[PlacedPicture]]:
        """Expand ids of `begin`, `between` or `glue`, which have one placeholder for each of their pictures.

        Returns (ids, places). Raises `RequestError` for ids with more placeholders, or fewer.
        """
        if not pictures:
            return token_ids, []
        assert self._pictures is not None, "they have been read"
        return self._pictures.expand_ids(token_ids, pictures, "messages as token ids")

    def check_pictures(self, pictures: Sequence[PlacedPicture], token_ids: Sequence[int]) -> None:
        """Raise `RequestError` if the engine does not take all pictures of a prompt, for example for their number."""
        if pictures and self._pictures is not None:
            self._pictures.check_placed(pictures, token_ids)

    def message(self, text: str) -> dict[str, Any]:
        """The message of an answer. It includes thinking that its header opened, if the template does not add that."""
        return {"role": "assistant", "content": self._opening + text}

    def between(self, shown: str, now: str, said: str, sampled: Sequence[int], *, has_ended: bool = True) -> list[int]:
        """Token ids between an answer and the next one.

        Args:
            shown: `text` of the conversation that the answer was sampled after.
            now: `text` of the same, with the answer's `message` and at least one more.
            said: text of the answer.
            sampled: its token ids. If they end as the template ends the message, that end is not repeated.
            has_ended: whether its last token ended it; False: it was cut off.

        Raises `RewrittenTurns` if `now` differs from `shown` and the sampled text.
        """
        kept = self._codec.without_end(sampled)
        if now.startswith(shown + said):
            text = now[len(shown) + len(said) :]
        else:
            text = self._text_after(shown, now, [said, self._codec.decode(kept)])
        end = self._codec.decode(list(sampled[len(kept) :]))
        if end and self.closing.startswith(end) and not text.startswith(end):
            text = self._text_from(end, text, said)
        elif end and has_ended and not self.closing.startswith(end) and not text.startswith(end):
            self._codec.warn_once(
                f"Answers end with {end!r}, and the chat template closes them by {self.closing!r}: earlier turns have "
                "both, since what was sampled is never changed. A policy that serves under this template should sample "
                "its end: give stop= or stop_token_ids= of that, or a chat_template= that closes by the sampled one."
            )
        return self._after_end(text, sampled, said)

    def glue(self, messages: Messages, sampled: Sequence[int]) -> list[int]:
        """Token ids from an answer like any other to the next one, if `messages` stand between them.

        Raises `RewrittenTurns` as `between` does, and `RequestError` for messages that the template cannot render.
        """
        text = self._text_after(
            self._render(self._base[:1]), self.text([*self._base, *as_messages(messages)]), [_ANSWER]
        )
        return self._after_end(text, sampled, None)

    def rewriting(self, roles: Sequence[str]) -> str | None:
        """How the template rewrites earlier turns once messages with these roles follow an answer; None: not at all.

        Tried on a conversation of three turns, whose answers think unless their header rules it out. `between`
        decides by the sampled ids. Raises `RequestError` if the template refuses such a conversation.
        """
        key = tuple(roles)
        if key not in self._rewriting:
            self._rewriting[key] = self._difference(key)
        return self._rewriting[key]

    def _difference(self, roles: tuple[str, ...]) -> str | None:
        header = self._thinking_header()
        said = _ANSWER if "</think>" in header else _THINKING + _ANSWER if header else f"<think>\n{_THINKING}{_ANSWER}"
        new = [_message(role, number) for number, role in enumerate(roles)]
        past = [_message("user")]
        for _ in range(_NUM_TURNS):
            past.append(self.message(said))
            try:
                self._text_after(self._render(past[:-1]), self._render([*past, *new]), [said])
            except RewrittenTurns as rewritten:
                return once_followed(roles, rewritten.how)
            past += new
        return None

    def _thinking_header(self) -> str:
        """The part of an answer's header about thinking, for example "<think>" or "<think></think>"; "" without one."""
        question = _message("user")
        _, begins, rest = self._render([question]).rpartition(question["content"])[2].partition("<think>")
        return begins + rest

    def _unwritten_opening(self) -> str:
        """The header's thinking if the template writes it only there, so that messages have to include it; else ""."""
        header = self._thinking_header()
        if not header:
            return ""
        asked = [_message("user")]
        said = _ANSWER if "</think>" in header else _THINKING + _ANSWER
        wanted = self._render(asked) + said
        with_header, without = (
            self._render([*asked, {"role": "assistant", "content": content}], opens=False)
            for content in (header + said, said)
        )
        return header if with_header.startswith(wanted) and not without.startswith(wanted) else ""

    def _text_after(self, shown: str, now: str, said: Sequence[str]) -> str:
        """The rest of `now` after `shown` and an answer, which stands there in one of the forms of `said`.

        A template that writes only the spaces of an answer differently does not rewrite it: the sampled ones are kept.
        """
        for answer in said:
            if now.startswith(shown + answer):
                return now[len(shown) + len(answer) :]
        for answer in said:
            if (text := _after_words(now, shown, answer)) is not None:
                self._codec.warn_once(
                    "The chat template writes answers with other spaces than were sampled (it may trim them). Earlier "
                    "turns keep the spaces that were sampled."
                )
                return text
        raise RewrittenTurns(_difference_of(shown + said[0], now))

    def _text_from(self, end: str, text: str, said: str) -> str:
        """The text after an answer that was sampled up to its `end`, from that end on, if the template writes it there.

        Raises `RewrittenTurns` for words in front of it, for example empty thinking in front of an empty answer.
        """
        before, found, _ = text.partition(end)
        if found and before.strip():
            raise RewrittenTurns(_difference_of(said + end, said + text))
        return text[len(before) :] if found else text

    def _after_end(self, text: str, sampled: Sequence[int], said: str | None) -> list[int]:
        """Token ids of the text after an answer, without the part of it that was sampled with the answer."""
        token_ids = self._codec.encode(text, add_special_tokens=False) if self._is_split else []
        if not (token_ids and self._codec.is_cut_out(token_ids[0])):  # it may close only the last answer by a token
            token_ids = self._after_base(text) if said is None else []
        if token_ids or said is None:
            return token_ids[_overlap(sampled, token_ids) :]
        whole = self._codec.decode(list(sampled))
        end = whole[len(said) :] if whole.startswith(said) else ""
        return self._after_base(text[len(end) :], end) if text.startswith(end) else self._after_base(text)

    def _begins_with_a_token(self, closing: str) -> bool:
        """Whether a template closes answers by a token that is found before any other text is divided into tokens."""
        token_ids = self._codec.encode(closing, add_special_tokens=False)
        begins = bool(token_ids) and self._codec.is_cut_out(token_ids[0])
        return begins and token_ids == self._after_base(closing)

    def _after_base(self, text: str, end: str = "") -> list[int]:
        """Token ids of the text after an answer and its `end`."""
        before = self._codec.encode(self._base_text + end, add_special_tokens=False)
        token_ids = self._codec.encode(self._base_text + end + text, add_special_tokens=False)
        if token_ids[: len(before)] != before:
            what = "the tokenizer joins the end of an answer with what the chat template writes behind it"
            raise RequestError(f"Turns cannot be continued: {what}.", field="chat_template")
        return token_ids[len(before) :]

    def _render(self, messages: Messages, *, opens: bool = True) -> str:
        options: dict[str, Any] = {**self._options, "add_generation_prompt": opens}
        return self._codec.render_chat(messages, **options)


def once_followed(roles: Sequence[str], how: str) -> str:
    """Describe how earlier turns are rewritten once messages of these roles follow."""
    return f"once {' and '.join(dict.fromkeys(roles))} messages follow an answer, {how}"


def _message(role: str, number: int = 0) -> dict[str, Any]:
    return {"role": role, "content": f"Something from the {role}, number {number}."}


def _after_words(now: str, shown: str, answer: str) -> str | None:
    """The rest of `now` after `shown` and the words of an answer, whatever the spaces between; None: it has others."""
    head = shown.rstrip()
    if not now.startswith(head):
        return None
    words = "".join((shown[len(head) :] + answer).split())
    rest = now[len(head) :]
    if not "".join(rest.split()).startswith(words):
        return None
    end, left = 0, len(words)
    for found in re.finditer(r"\S+", rest):
        if not left:
            break
        end = found.start() + min(left, len(found[0]))
        left -= min(left, len(found[0]))
    spaces = answer[len(answer.rstrip()) :]
    return rest[end + _overlap(spaces, rest[end:]) :]


def _overlap(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest end of `first` that `second` begins with."""
    lengths: Iterator[int] = reversed(range(1, min(len(first), len(second)) + 1))
    ends = (n for n in lengths if second[n - 1] == first[-1])
    return next((n for n in ends if list(first[-n:]) == list(second[:n])), 0)


def _difference_of(kept: str, now: str) -> str:
    start = max(len(commonprefix([kept, now])) - _EXCERPT, 0)
    was, becomes = (text[start : start + 2 * _EXCERPT] for text in (kept, now))
    return f"{was!r} becomes {becomes!r}"
