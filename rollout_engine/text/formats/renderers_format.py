"""Answers as the package `renderers` (PrimeIntellect) reads them: "renderers:qwen3.5", "renderers:glm-5" and others.

The package parses whole answers: a stream of it returns everything at the end. Prompts stay those of the chat template.
"""

import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.answer import AnswerParts, AnswerPiece
from rollout_engine.text.formats.call_reader import Schemas
from rollout_engine.text.formats.json_calls import MAX_CALLS, MAX_PROBLEM_CHARACTERS
from rollout_engine.text.formats.tool_arguments import parse_json
from rollout_engine.text.tokenizer import TextCodec

RENDERERS = "renderers:"
"""Begins the names of these formats."""
_NO_FAMILIES = ("auto", "custom", "default")
"""Names of the package that ask a hub, or the caller, which family it is."""


def check_renderer(name: str) -> str:
    """Return "renderers:NAME" if there is such a renderer. Raises `RequestError`."""
    _config_of(name)
    return name


class RenderersFormat:
    """Reads one family by its renderer; see `AnswerFormat`."""

    def __init__(self, codec: TextCodec, name: str) -> None:
        """Raises `RequestError` if there is no such renderer, or it does not take the tokenizer."""
        self.name, self._codec = name, codec
        package, config = _config_of(name)
        try:
            self._renderer = package.create_renderer(codec.hf, config)
        except Exception as problem:  # it asserts that the tokenizer has the family's tokens
            hint = f"{type(problem).__name__}: {problem}"
            raise RequestError.for_field("tool_format", name, "a renderer that takes this tokenizer", hint) from problem

    def read(
        self,
        token_ids: Sequence[int],
        text: str,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Schemas | None = None,
        skip_special_tokens: bool = True,
    ) -> AnswerParts:
        """Read a whole answer; arguments as in `AnswerFormat`."""
        prompt = None if isinstance(prompt_end, str) else list(prompt_end)
        schemas = None if tools is None else [schema.get("function", schema) for schema in tools]
        try:
            parsed = self._renderer.parse_response(list(token_ids), tools=schemas, prompt_ids=prompt)
        except Exception:  # the text of a policy is no reason to end a request
            return AnswerParts(text=text)
        parts = AnswerParts(parsed.reasoning_content, parsed.content or "")
        parts.is_thinking = parsed.reasoning_complete is False
        found = [_make_call(each) for each in parsed.tool_calls[: MAX_CALLS + 1]]
        found[MAX_CALLS:] = [BrokenCall("", f"more than {MAX_CALLS} calls in one answer") for _ in found[MAX_CALLS:]]
        is_text = [tools is None or isinstance(each, BrokenCall) for each in found]
        raws = [each.raw for each, stays in zip(parsed.tool_calls, is_text, strict=False) if stays and each.raw]
        parts.text = "\n".join(words for words in (parts.text, *raws) if words)
        parts.found = found if tools is not None else []
        return parts

    def stream(
        self,
        *,
        prompt_end: Sequence[int] | str = "",
        tools: Schemas | None = None,
        skip_special_tokens: bool = True,
    ) -> "WholeStream":
        """Begin to read an answer as it is sampled."""
        return WholeStream(self, prompt_end, tools)

    def write(self, thinking: str | None, text: str) -> str | None:
        """Write thinking and words as the family does: the package has no such function."""
        return text if thinking is None else None

    def write_calls(self, calls: Sequence[ToolCall]) -> str | None:
        """Write calls as the family does."""
        return None

    def spell_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer with its tags, without its end token."""
        return self._codec.decode(self._codec.without_end(token_ids))

    def has_tags(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of these tokens is a tag: special tokens inside an answer are."""
        return any(each in self._codec.special_texts for each in self._codec.without_end(token_ids))

    def new_call_id(self, name: str, index: int) -> str:
        """Make an id for a call, in the form that the template takes."""
        return f"functions.{name}:{index}" if "kimi" in self.name else f"call_{uuid.uuid4().hex[:24]}"


class WholeStream:
    """Reads one answer at its end."""

    def __init__(self, form: RenderersFormat, prompt_end: Sequence[int] | str, tools: Schemas | None) -> None:
        self._form, self._prompt_end = form, prompt_end
        self._tools = None if tools is None else list(tools)
        self._token_ids: list[int] = []
        self._text = ""
        self._parts = AnswerParts()

    @property
    def parts(self) -> AnswerParts:
        """All parts of the answer, after `end`."""
        return self._parts

    def feed(self, token_ids: Sequence[int], text: str) -> list[AnswerPiece]:
        """Take the next tokens, and the text released since."""
        self._token_ids += token_ids
        self._text += text
        return []

    def end(self) -> list[AnswerPiece]:
        """Return the pieces that are left, once the answer has ended."""
        parts = self._form.read(self._token_ids, self._text, prompt_end=self._prompt_end, tools=self._tools)
        self._parts = parts
        pieces = [] if parts.thinking is None else [AnswerPiece("thinking", parts.thinking)]
        pieces += [AnswerPiece("text", parts.text)] if parts.text else []
        return pieces + [AnswerPiece("call", call=call) for call in parts.calls]


def _config_of(name: str) -> tuple[ModuleType, Any]:
    """The package, and its configuration of the renderer that "renderers:NAME" names."""
    try:
        import renderers
    except ImportError as problem:
        hint = f"pip install 'rollout-engine[renderers]' ({problem})."
        raise RequestError.for_field("tool_format", name, "absent: renderers is not installed", hint) from None
    family = name.removeprefix(RENDERERS)
    try:
        if family in _NO_FAMILIES:
            raise ValueError(f"{family!r} is no family")
        return renderers, renderers.config_from_name(family)
    except ValueError as problem:
        raise RequestError.for_field("tool_format", name, "a renderer of the package", str(problem)) from None


def _make_call(call: Any) -> ToolCall | BrokenCall:
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError):
            arguments = None
    status = getattr(call.status, "value", str(call.status))
    if status in ("ok", "unknown_tool") and isinstance(call.name, str) and isinstance(arguments, dict):
        return ToolCall(call.name, arguments)
    problem = status if status not in ("ok", "unknown_tool") else "its arguments are no object"
    return BrokenCall((call.raw or "")[:MAX_PROBLEM_CHARACTERS], problem)
