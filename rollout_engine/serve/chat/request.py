"""One request of any dialect of conversations, in the engine's words."""

from typing import Any

import msgspec

from rollout_engine.serve.request_templates import brings_template
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.conversations import as_messages


class ChatRequest(msgspec.Struct, kw_only=True):
    """A conversation to answer."""

    messages: list[Any]
    """As chat templates take them: "role", "content", and perhaps "reasoning_content", "tool_calls", "tool_call_id"."""
    tools: list[Any] | None = None
    """{"type": "function", "function": {...}} each."""
    tool_choice: Any = None
    """In OpenAI's form: "auto", "none", "required" or {"type": "function", "function": {"name": ...}}."""
    options: dict[str, Any] = {}
    """`ChatOptions` of the template; "tools" are among them if the prompt shows them."""
    settings: Settings
    stream: bool = False
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    session_id: str | None = None
    request_id: str | None = None
    """The client's name for the request, by which it may be aborted."""

    @property
    def must_show_tools(self) -> bool:
        """Whether the prompt has to show its tools: not if a grammar forces the calls, or the client looks for them."""
        return must_show_tools(self.tool_choice)

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt that the chat template makes."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"messages": self.messages, **self.options, **salt}


def must_show_tools(tool_choice: Any) -> bool:
    """Whether the prompt has to show tools under this choice."""
    return tool_choice in (None, "auto")


def without_hidden_tools(
    served: Served, messages: list[Any], options: dict[str, Any], tool_choice: Any
) -> dict[str, Any]:
    """The options of the chat template, without tools that it would not show and need not. Raises `RequestError`."""
    if "tools" in options and not must_show_tools(tool_choice):
        if not brings_template(served, options.get("chat_template")):
            if not served.codec.shows_tools(as_messages(messages), **options):
                return {name: value for name, value in options.items() if name != "tools"}
    return options
