"""Prompts of a conversation's later turns, as token ids in which what was sampled stays as it was sampled.

    prompt of the next turn = this turn's prompt + the sampled ids + glue
    glue                    = the template's end of the answer, the new messages, the header of the next answer

To render the conversation anew and encode it again would give other ids for the same text. And a template may render
earlier answers differently from how they were sampled, for example without their thinking: then the sum above is not
what the template says, and `ChatTurns.rewriting` tells.
"""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, Unpack

from rollout_engine.errors import RequestError
from rollout_engine.text.conversations import ChatOptions, as_messages
from rollout_engine.text.tokenizer import TextCodec

Messages = list[dict[str, Any]]

_ANSWER = "An answer: 0f1e2d3c."
"""Stands for what is sampled. No other text of a conversation contains it."""
_ANSWERS = {"answers": _ANSWER, "answers that think": f"<think>\nLet me see.\n</think>\n\n{_ANSWER}"}
_NUM_TURNS = 3
_EXCERPT = 60
"""Characters shown on either side of a difference."""


class ChatTurns:
    """The prompts of conversations under one chat template and its options."""

    def __init__(self, codec: TextCodec, **options: Unpack[ChatOptions]) -> None:
        """Raises `RequestError` where there is no chat template, or it does not write an answer as it is."""
        self._codec, self._options = codec, options
        self._rewriting: dict[tuple[str, ...], str | None] = {}
        self._base = [_message("user"), {"role": "assistant", "content": _ANSWER}]
        closed = self._render(self._base, opens=False)
        if closed.count(_ANSWER) != 1:
            what = f"The chat template does not write an answer as it is: {_ANSWER!r} becomes {closed!r}"
            raise RequestError(f"{what}. Give chat_template= with one that does.", field="chat_template")
        self._base_text = closed[: closed.index(_ANSWER) + len(_ANSWER)]
        self._base_ids = codec.encode(self._base_text, add_special_tokens=False)
        self._is_split = self._begins_with_a_token(closed[len(self._base_text) :])
        """Whether the text behind an answer is encoded to the same ids without what comes before it."""

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to the header of its next answer. Raises `RequestError`."""
        options = {**self._options, "add_generation_prompt": True}
        return self._codec.encode_chat(as_messages(messages), **options)[1]

    def glue(self, messages: Messages, sampled: Sequence[int]) -> list[int]:
        """Token ids between an answer and the next one.

        Args:
            messages: what comes after the answer, at least one message.
            sampled: the answer's token ids. Where the last one ends the message in the template too, it is not
                repeated.

        Raises `RequestError` for messages that the template cannot render there.
        """
        text = self._glue_text(as_messages(messages))
        token_ids = self._codec.encode(text, add_special_tokens=False) if self._is_split else self._after_base(text)
        ends_twice = bool(sampled) and token_ids[:1] == [sampled[-1]]
        return token_ids[1:] if ends_twice else token_ids

    def rewriting(self, roles: Sequence[str]) -> str | None:
        """How the template rewrites earlier turns once messages with these roles follow an answer; None: not at all.

        Tried on conversations of three turns, whose answers think and do not. A template may still look at the words
        of messages. Raises `RequestError` where it refuses such a conversation.
        """
        key = tuple(roles)
        if key not in self._rewriting:
            found = (self._difference(key, kind, answer) for kind, answer in _ANSWERS.items())
            self._rewriting[key] = next((each for each in found if each is not None), None)
        return self._rewriting[key]

    def _begins_with_a_token(self, closing: str) -> bool:
        """Whether a template closes answers by a token that is found before any other text is divided into tokens."""
        token_ids = self._codec.encode(closing, add_special_tokens=False)
        begins = bool(token_ids) and self._codec.is_cut_out(token_ids[0])
        return begins and token_ids == self._after_base(closing)

    def _after_base(self, text: str) -> list[int]:
        """Token ids of the text behind an answer."""
        token_ids = self._codec.encode(self._base_text + text, add_special_tokens=False)
        start = len(self._base_ids)
        if token_ids[:start] != self._base_ids:
            what = "the tokenizer joins the end of an answer with what the chat template writes behind it"
            raise RequestError(f"Turns cannot be continued: {what}.", field="chat_template")
        return token_ids[start:]

    def _difference(self, roles: tuple[str, ...], kind: str, answer: str) -> str | None:
        messages = [_message("user")]
        kept = self._render(messages)
        new = [_message(role, number) for number, role in enumerate(roles)]
        for _ in range(_NUM_TURNS):
            messages += [{"role": "assistant", "content": answer}, *new]
            kept, rendered = kept + answer + self._glue_text(new), self._render(messages)
            if kept != rendered:
                start = max(len(commonprefix([kept, rendered])) - _EXCERPT, 0)
                was, now = (text[start : start + 2 * _EXCERPT] for text in (kept, rendered))
                who = " and ".join(dict.fromkeys(roles))
                return f"once {who} messages follow {kind}, {was!r} becomes {now!r}"
        return None

    def _glue_text(self, messages: Messages) -> str:
        text = self._render([*self._base, *messages])
        if not text.startswith(self._base_text):
            what = "once messages follow it, the chat template writes an answer, or what comes before it, differently"
            raise RequestError(f"Turns cannot be continued: {what}.", field="chat_template")
        return text[len(self._base_text) :]

    def _render(self, messages: Messages, *, opens: bool = True) -> str:
        return self._codec.render_chat(messages, **{**self._options, "add_generation_prompt": opens})


def _message(role: str, number: int = 0) -> dict[str, Any]:
    return {"role": role, "content": f"Something from the {role}, number {number}."}
