"""Fields of requests of Anthropic's dialect, and their settings in the engine's words."""

from collections.abc import Iterator
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.anthropic.content import find_pictures, is_prefill, read_messages
from rollout_engine.serve.chat.checked import as_object, as_text, check_keys, choose
from rollout_engine.serve.chat.effort import template_variables
from rollout_engine.serve.forms import form_of
from rollout_engine.serve.media.sources import Source
from rollout_engine.serve.request_templates import chat_options
from rollout_engine.serve.sampling import SAMPLING_PEERS, SamplingFields
from rollout_engine.serve.served import Served

IGNORED = frozenset(
    (
        *("metadata", "service_tier", "inference_geo", "cache_control", "diagnostics", "user_profile_id"),
        *("workspace_id", "beta", "betas", "billing_policy"),
    )
)
"""Fields that change no token. "beta" is in the query of clients that ask for new features."""
_EDITS_NOTHING: tuple[Any, ...] = {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
PEERS: dict[str, tuple[Any, ...]] = {
    **SAMPLING_PEERS,
    "container": (),
    "context_management": ({}, *_EDITS_NOTHING),
    "compaction": ({},),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
"""Fields that are not served -> the values that ask for nothing."""
_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict")
_TOOL_IGNORED = ("cache_control", "allowed_callers", "eager_input_streaming", "input_examples")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class PromptFields(SamplingFields, kw_only=True):
    """Fields that make the prompt."""

    messages: list[Any]
    model: str | None = None
    system: Any = None
    """A text, or blocks of text."""
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    """{"type": "enabled", "budget_tokens": n}, {"type": "adaptive"} or {"type": "disabled"}."""
    output_config: dict[str, Any] | None = None
    """{"effort": ..., "format": {"type": "json_schema", "schema": ...}}."""
    output_format: dict[str, Any] | None = None
    """The former place of `output_config.format`."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def find_pictures(self) -> Iterator[Source]:
        """The pictures that the body names."""
        return find_pictures(self.messages)


class MessagesBody(PromptFields, kw_only=True):
    """Fields of a request; sampling parameters of ours may stand among them, as in OpenAI's dialect."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    """Give the ids of the prompt and of the sample."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


def read_prompt(served: Served, body: PromptFields) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, options of the chat template) of a body. Raises `RequestError`."""
    messages = read_messages(body.system, body.messages)
    if not messages or not body.messages:
        raise RequestError.for_field("messages", body.messages, "a list of at least one message")
    options = chat_options(body)
    options.pop("tools", None)
    if is_prefill(messages) and body.continue_final_message is None:
        options["continue_final_message"] = True
    if body.tools:
        options["tools"] = read_tools(body.tools)
    variables = template_variables(served, body.chat_template, effort=_effort(body), thinks=_thinks(body))
    if variables:
        options["chat_template_kwargs"] = variables | (body.chat_template_kwargs or {})
    return messages, options


def read_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form. Raises `RequestError` for tools that a server would have to run."""
    return [_read_tool(as_object(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(tools)]


def read_choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """(tool_choice in OpenAI's form, whether there may be one call alone). Raises `RequestError`."""
    if choice is None:
        return None, False
    check_keys(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind = choose(choice.get("type"), "tool_choice['type']", (*_CHOICES, "tool"))
    is_single = choice.get("disable_parallel_tool_use") is True
    if kind != "tool":
        return _CHOICES[kind], is_single
    name = as_text(choice.get("name"), "tool_choice['name']")
    return {"type": "function", "function": {"name": name}}, is_single


def read_form(body: PromptFields) -> dict[str, Any] | None:
    """The structured outputs that a body asks for. Raises `RequestError`."""
    config, place = body.output_config or {}, "output_config['format']"
    check_keys(config, "output_config", ("effort", "format"), ("task_budget",))
    asked = config.get("format")
    if body.output_format is not None:
        asked, place = body.output_format, "output_format"
    if asked is None:
        return None
    given = as_object(asked, place)
    check_keys(given, place, ("type", "schema"), ("name",))
    choose(given.get("type"), f"{place}['type']", ("json_schema",))
    schema = as_object(given.get("schema"), f"{place}['schema']", "a JSON schema")
    return form_of({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})


def read_budget(body: PromptFields) -> dict[str, Any]:
    """The sampling parameter of the thinking that a body asks for. Raises `RequestError`."""
    asked = body.thinking
    if asked is None:
        return {}
    check_keys(asked, "thinking", ("type", "budget_tokens", "display"))
    kind = choose(asked.get("type"), "thinking['type']", ("enabled", "adaptive", "disabled"))
    if asked.get("display") is not None:
        choose(asked["display"], "thinking['display']", ("summarized", "omitted"))
    budget = asked.get("budget_tokens")
    if kind != "enabled":
        if budget is not None:
            raise RequestError.for_field("thinking['budget_tokens']", budget, 'given with type "enabled" alone')
        return {}
    if type(budget) is not int or budget < 1:
        raise RequestError.for_field("thinking['budget_tokens']", budget, "a number of tokens, at least 1")
    if body.thinking_budget not in (None, budget):
        bound = f"thinking['budget_tokens'], which is {budget}"
        raise RequestError.for_field("thinking_budget", body.thinking_budget, bound, "Give one of them.")
    return {"thinking_budget": budget}


def hides_thinking(body: PromptFields) -> bool:
    """Whether blocks of thinking are to be empty, so that only their signatures hold it."""
    return body.thinking is not None and body.thinking.get("display") == "omitted"


def _thinks(body: PromptFields) -> bool | None:
    """Whether answers are asked to think, or not to; None: the body leaves it open."""
    kind = None if body.thinking is None else body.thinking.get("type")
    return None if kind is None else kind != "disabled"


def _effort(body: PromptFields) -> str | None:
    effort = None if body.output_config is None else body.output_config.get("effort")
    return None if effort is None else as_text(effort, "output_config['effort']")


def _read_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        hint = "Describe a tool that you run yourself by name, description and input_schema."
        raise RequestError.for_field(f"{place}['type']", tool["type"], '"custom", or left out', hint)
    check_keys(tool, place, _TOOL_KEYS, _TOOL_IGNORED)
    function: dict[str, Any] = {"name": as_text(tool.get("name"), f"{place}['name']")}
    if tool.get("description") is not None:
        function["description"] = as_text(tool["description"], f"{place}['description']")
    function["parameters"] = as_object(tool.get("input_schema"), f"{place}['input_schema']", "a JSON schema")
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}
