"""Tool calls in answers, as OpenAI's clients read them."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from rollout_engine.episodes.tool_calls import ToolFormat, format_of_template, parse_typed_calls
from rollout_engine.errors import RequestError
from rollout_engine.serve.served import Served

_BEGINS = re.compile(r"<tool_call>|<\|python_tag\|>|^\s*\{")


class ToolParser:
    """Finds the calls in answers to one request.

    Args:
        form: how the chat template teaches to write them.
        tools: JSON schemas.
    """

    def __init__(self, served: Served, form: ToolFormat, tools: Sequence[Any]) -> None:
        self._codec, self._form, self._tools = served.codec, form, tools

    @classmethod
    def of(
        cls, served: Served, tools: Sequence[Any] | None, tool_choice: Any, chat_template: str | None
    ) -> "ToolParser | None":
        """The parser of a request; None where it has no tools. Raises `RequestError` where a call is to be forced."""
        if tool_choice not in (None, "auto", "none"):
            bound = '"auto", "none" or absent: an answer cannot be forced to be a call'
            raise RequestError.for_field("tool_choice", tool_choice, bound)
        if not tools or tool_choice == "none":
            return None
        for index, tool in enumerate(tools):
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                bound = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise RequestError.for_field(f"tools[{index}]", tool, bound)
        template = chat_template or served.codec.hf.chat_template
        form = format_of_template(str(template))
        if form is None:
            hint = "Give a chat_template that has them."
            raise RequestError.for_field("tools", "tools", "absent: the chat template teaches no form of calls", hint)
        return cls(served, form, tools)

    def find(self, token_ids: list[int]) -> list[dict[str, Any]]:
        """The calls of an answer. What is broken stays text."""
        found = parse_typed_calls(self._codec.decode(token_ids), self._form, self._tools)
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in found.calls
        ]

    def text_before(self, text: str) -> str:
        """What an answer says before its first call."""
        found = _BEGINS.search(text)
        return text[: found.start()].rstrip() if found else text
