"""Renders conversations by a chat template, in the form that it takes, and refuses messages that it would leave out.

Templates differ in their input: content as text or as parts, arguments of tool calls as objects or as JSON text, and
which roles they write at all. A template is a program, so each question is answered by rendering: once per template,
role and question, with the conversation that raised it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.text.picture_parts import is_picture, without_images
from rollout_engine.text.reasoning_keys import ReasoningKeys, reasoning_keys, with_reasoning

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]

_MARK = "31415926535897932384"
"""Stands for other words than those of a conversation; digits, which a change of case leaves as they are."""
_MAX_KNOWN = 256
"""Templates, or roles of one, that are remembered: requests may bring both, so all are forgotten beyond this number."""
_MAX_ROLES = 32
"""Different roles in one conversation: each new one costs renderings of it all."""
_INSTEAD = {
    "developer": "Give it as 'system', or a chat_template that writes it.",
    "tool": "Give it as 'user', or a chat_template that writes it.",
}


class ChatRenderer:
    """Renders conversations by the chat templates of one tokenizer, or given ones."""

    def __init__(self, hf: PreTrainedTokenizerBase, warn_once: Callable[[str], None]) -> None:
        self._hf, self._warn_once = hf, warn_once
        self._parts_read: dict[tuple[str, str], bool] = {}
        """(template, role) -> whether the template reads the parts of such messages."""
        self._parts_alone: dict[tuple[str, str], bool] = {}
        """(template, role) -> whether it reads parts, and leaves out content that is a text."""
        self._reasoning = ReasoningKeys()
        self._written: dict[str, set[tuple[str, str]]] = {}
        """Template -> roles and keys of messages that are known to reach the text."""

    def render(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = False,
    ) -> str:
        """Render messages that `as_messages` returned; options as in `ChatOptions`. Raises `RequestError`.

        The template writes something for a picture, or nothing: the caller counts placeholders.
        """
        _require_few_roles(messages)
        messages = without_images(messages)
        variables = chat_template_kwargs or {}
        template = self.find_template(chat_template, tools)
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt

        def write(shown: Messages, key: str | None = None) -> str:
            return str(
                self._hf.apply_chat_template(
                    with_reasoning(shown, key),
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=opens,
                    continue_final_message=bool(continue_final_message),
                    tokenize=False,
                    **variables,
                )
            )

        key = self._reasoning.find(template, messages, write)
        self._warn_of_unread(template, [*variables, *([] if key else reasoning_keys(messages))])
        render = partial(write, key=key)
        shown = self._with_parts_as_read(template, messages, render)
        shown = self._with_texts_as_parts(template, shown, render)
        try:
            shown, text = _render_messages(shown, render)
        except Exception as problem:  # a template is a program: it may raise anything
            raise RequestError(
                f"The chat template cannot render these messages: {type(problem).__name__}: {problem}",
                field="messages",
                value=messages,
            ) from problem
        self._require_all_written(template, shown, render, text)
        return text

    def find_template(self, named: str | None, tools: Sequence[Any] | None) -> str:
        """Return the text of the chat template that is used, or will be with these tools. Raises `RequestError`."""
        own = self._hf.chat_template
        if named is not None and "{" not in named and not (isinstance(own, dict) and named in own):
            names = f", or one of the tokenizer's: {', '.join(own)}" if isinstance(own, dict) else ""
            raise RequestError.for_field("chat_template", named, f"a Jinja template{names}", "A path is not read.")
        if named is None and own is None:
            bound = "text or token ids: this tokenizer has no chat template"
            raise RequestError.for_field("messages", "a conversation", bound, "Or give chat_template=...")
        try:
            return str(self._hf.get_chat_template(named, list(tools) if tools else None))
        except ValueError as problem:  # several templates, and no default among them
            raise RequestError.for_field("chat_template", named, f"one of {', '.join(own)}", str(problem)) from None

    def _warn_of_unread(self, template: str, names: Iterable[str]) -> None:
        """Warn of each variable in `names` that a template never reads."""
        if not (listed := list(names)):
            return
        read = set(re.findall(r"\w+", template))
        for name in listed:
            if name not in read:
                self._warn_once(f"The chat template never reads '{name:.80}': giving it changes no prompt.")

    def _with_parts_as_read(self, template: str, messages: Messages, render: Render) -> Messages:
        """Return messages whose lists of parts are joined by newlines, if the template cannot read those of a role."""
        shown, in_parts = messages, [each["role"] for each in messages if not isinstance(each["content"], str)]
        for role in dict.fromkeys(in_parts):
            listed = [
                i for i, each in enumerate(messages) if each["role"] == role and not isinstance(each["content"], str)
            ]
            if (template, role) not in self._parts_read:
                _remember(self._parts_read, (template, role), _reads_parts(_with_texts(shown), listed, render))
            if not self._parts_read[template, role]:
                shown = [{**m, "content": text_of(m["content"])} if i in listed else m for i, m in enumerate(shown)]
        return shown

    def _with_texts_as_parts(self, template: str, messages: Messages, render: Render) -> Messages:
        """Return messages whose texts are lists of one part, if the template leaves out plain texts of a role.

        Templates of models with images do, such as SmolVLM's.
        """
        shown = messages
        for role in dict.fromkeys(each["role"] for each in messages if isinstance(each["content"], str)):
            listed = [i for i, each in enumerate(messages) if each["role"] == role and isinstance(each["content"], str)]
            if (template, role) not in self._parts_alone:
                is_unread = _try(render, shown) == _try(render, _reword_messages(shown, role))
                _remember(self._parts_alone, (template, role), is_unread and _reads_parts(shown, listed, render))
            if self._parts_alone[template, role]:
                shown = [{**m, "content": _one_part(m["content"])} if i in listed else m for i, m in enumerate(shown)]
        return shown

    def _require_all_written(self, template: str, messages: Messages, render: Render, text: str) -> None:
        """Raise `RequestError` for messages or tool calls that do not reach the text of a conversation.

        A role and its tool calls are tried once. Of answers a template may leave parts out; any other message has to be
        there each time, since some write a system's message only if it is the first. They are rendered once more, with
        marks, if their words do not follow one another: those of one may stand in another.
        """
        known = self._written.get(template, set())
        given = ((each["role"], key) for each in messages for key in ("content", "tool_calls") if key in each)
        for role, key in [each for each in dict.fromkeys(given) if each not in known]:
            changed = _reword_messages(messages, role) if key == "content" else _without_calls(messages, role)
            if text == _try(render, changed):
                index = next(i for i, each in enumerate(messages) if each["role"] == role and key in each)
                raise _left_out(messages, index, key)
            if len(known) >= _MAX_KNOWN:
                known.clear()
            known.add((role, key))
        _remember(self._written, template, known)
        if not _is_in_order(messages, text) and (marked := _try(render, _mark_messages(messages))) is not None:
            written = set(re.findall(rf"{_MARK}\d{{9}}", marked))
            for index, message in enumerate(messages):
                if message["role"] != "assistant" and _mark(index) not in written:
                    raise _left_out(messages, index, "content")


def _require_few_roles(messages: Messages) -> None:
    roles = {each["role"] for each in messages}
    if len(roles) > _MAX_ROLES:
        raise RequestError.for_field("messages", f"{len(roles)} roles", f"a conversation of at most {_MAX_ROLES} roles")


def _is_in_order(messages: Messages, text: str) -> bool:
    """Whether the words of all messages, answers aside, follow one another in a text as they are."""
    end = 0
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            continue
        for words in [content] if isinstance(content, str) else _words_of(content):
            start = text.find(words.strip(), end)
            if start < 0:
                return False
            end = start + len(words.strip())
    return True


def _mark(index: int) -> str:
    return f"{_MARK}{index:09}"


def _mark_messages(messages: Messages) -> Messages:
    """Return a conversation in which all messages, answers aside, end with a mark of their own."""
    return [m if m["role"] == "assistant" else _say_otherwise(m, _mark(i)) for i, m in enumerate(messages)]


def _left_out(messages: Messages, index: int, key: str) -> RequestError:
    """Make the error of a message that the chat template leaves out of the prompt."""
    if key == "content":
        role = messages[index]["role"]
        bound = "a role that the chat template writes there: it leaves the message out"
        hint = _INSTEAD.get(role, "Give a chat_template that writes it.")
        return RequestError.for_field(f"messages[{index}]['role']", role, bound, hint)
    bound = "absent: the chat template leaves tool calls out"
    hint = "Write them into the content, or give a chat_template that writes them."
    return RequestError.for_field(f"messages[{index}]['tool_calls']", messages[index][key], bound, hint)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if key not in known and len(known) >= _MAX_KNOWN:
        known.clear()
    known[key] = value


def check_template(hf: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` unless the tokenizer's chat template is a Jinja template that transformers can compile."""
    try:
        hf.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    except Exception as problem:  # one that compiled may refuse any conversation; jinja2's errors of syntax have a line
        line = getattr(problem, "lineno", None)
        if line is not None:
            raise ConfigError(f"chat_template is not a Jinja template: line {line}: {problem}.") from None


def text_of(content: str | Sequence[dict[str, str]]) -> str:
    """Return content as one text, its parts joined by newlines. Raises `RequestError` for pictures."""
    if isinstance(content, str):
        return content
    if any(map(is_picture, content)):
        bound = "text: this chat template, or the lack of one, shows no parts of such messages"
        raise RequestError.for_field("messages", "a picture", bound, "Give a chat_template that shows pictures.")
    return "\n".join(_words_of(content))


def _words_of(content: Sequence[dict[str, str]]) -> list[str]:
    """The texts among the parts of content."""
    return [part["text"] for part in content if not is_picture(part)]


def _one_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _render_messages(messages: Messages, render: Render) -> tuple[Messages, str]:
    """Return the messages and their text; arguments of tool calls are JSON text if the template fails on objects."""
    try:
        return messages, render(messages)
    except Exception:  # a template may raise anything
        if not any("tool_calls" in message for message in messages):
            raise
        as_text = [{**message, **_with_text_arguments(message)} for message in messages]
        text = _try(render, as_text)
        if text is None:
            raise
        return as_text, text


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the tool calls of a message with their arguments as JSON text."""
    return {"tool_calls": list(_text_calls(message["tool_calls"]))} if "tool_calls" in message else {}


def _text_calls(calls: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for call in calls:
        function = call.get("function", call)
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        yield {**call, "function": function} if "function" in call else function


def _reads_parts(messages: Messages, listed: Sequence[int], render: Render) -> bool:
    """Whether a template writes two parts of text as texts, and does not write the list that holds them."""
    words = [f"{_MARK}a", f"{_MARK}b"]
    parts = [{"type": "text", "text": word} for word in words]
    shown = [{**each, "content": parts} if i in listed else each for i, each in enumerate(messages)]
    text = _try(render, shown)
    return text is not None and all(word in text and not re.search(rf"""["']{word}""", text) for word in words)


def _with_texts(messages: Messages) -> Messages:
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": "\n".join(_words_of(message["content"]))}
        for message in messages
    ]


def _reword_messages(messages: Messages, role: str) -> Messages:
    """Return a conversation in which messages of a role have other words and calls."""
    return [_say_otherwise(message) if message["role"] == role else message for message in messages]


def _say_otherwise(message: dict[str, Any], mark: str = _MARK) -> dict[str, Any]:
    """Return a message with other words and calls."""
    content = message["content"]
    said = content + mark if isinstance(content, str) else [*content, {"type": "text", "text": mark}]
    calls = {"tool_calls": [_MARK]} if "tool_calls" in message else {}
    return {**message, "content": said, **calls}


def _without_calls(messages: Messages, role: str) -> Messages:
    return [
        {key: value for key, value in message.items() if key != "tool_calls"} if message["role"] == role else message
        for message in messages
    ]


def _try(render: Render, messages: Messages) -> str | None:
    """Render messages; None if the template raises, so that it has read them."""
    try:
        return render(messages)
    except Exception:  # a template may raise anything
        return None
