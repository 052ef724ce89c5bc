"""Fields of requests for OpenAI's responses, and their settings in the engine's words."""

from collections.abc import Iterator
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.chat.checked import as_list, as_object, as_text, check_keys, choose
from rollout_engine.serve.chat.effort import template_variables
from rollout_engine.serve.forms import form_of
from rollout_engine.serve.media.sources import Source
from rollout_engine.serve.openai.response_items import ItemReader, find_pictures
from rollout_engine.serve.openai.shapes import StreamOptions
from rollout_engine.serve.request_templates import chat_options
from rollout_engine.serve.sampling import SAMPLING_PEERS, SamplingFields
from rollout_engine.serve.served import Served
from rollout_engine.sessions.known_responses import KnownResponses

IGNORED = frozenset(
    (
        *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "max_tool_calls", "access_programs", "image", "client_metadata"),
    )
)
"""Fields that change no token."""
PEERS: dict[str, tuple[Any, ...]] = {
    **SAMPLING_PEERS,
    "background": (False,),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Fields that are not served -> the values that ask for nothing."""
_INCLUDES_LOGPROBS, _INCLUDES_THINKING = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDABLE = (
    *(_INCLUDES_LOGPROBS, _INCLUDES_THINKING, "message.input_image.image_url", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "file_search_call.results", "web_search_call.action.sources"),
)
"""Those behind the first two are of items that never occur here."""
_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
_TOOL_IGNORED = ("allowed_callers", "output_schema")
_NOT_STORED = "Responses are not stored here: send the whole conversation as input."


class ResponsesBody(SamplingFields, kw_only=True):
    """Fields of a request; sampling parameters of ours may stand among them, as in chats."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """False: an answer that has to be a call is one call; free answers may have several anyway."""
    text: dict[str, Any] | None = None
    """{"format": {"type": "json_schema", "schema": ...}}."""
    reasoning: dict[str, Any] | None = None
    """{"effort": ...}, for chat templates that read it."""
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None
    """Give the ids of the prompt and of the sample."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None

    @property
    def includes_logprobs(self) -> bool:
        """Whether the texts of the answer have log-probs."""
        return _INCLUDES_LOGPROBS in (self.include or ())

    @property
    def includes_thinking(self) -> bool:
        """Whether reasoning items have contents that clients hand back unread."""
        return _INCLUDES_THINKING in (self.include or ())

    def find_pictures(self) -> Iterator[Source]:
        """The pictures that the body names."""
        return find_pictures(self.input)


def read_conversation(
    served: Served, body: ResponsesBody, known: KnownResponses | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages of earlier responses, those of the input) of a body. Raises `RequestError`.

    `known`: the responses of the session; None without one.
    """
    if body.store and known is None:
        raise RequestError.for_field("store", True, "false, or left out", _NOT_STORED)
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = None if known is None else known.get(body.previous_response_id)
        if found is None:
            bound = "absent" if known is None else "a response of this session that is still known"
            raise RequestError.for_field("previous_response_id", body.previous_response_id, bound, _NOT_STORED)
        earlier = found
    template = served.codec.find_template(body.chat_template, None)
    reader = ItemReader(earlier, has_developer="developer" in template)
    reader.read(body.input)
    reader.close()
    if not earlier and not reader.messages:
        raise RequestError.for_field("input", body.input, "a text, or at least one item")
    return earlier, reader.messages


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind the instructions. System messages at the begin become one: templates take no more."""
    given = [] if instructions is None else [{"role": "system", "content": instructions}]
    count = next((i for i, each in enumerate(messages) if not _is_plain_system(each)), len(messages))
    first = [each["content"] for each in (*given, *messages[:count])]
    system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    return [*system, *messages[count:]]


def read_options(served: Served, body: ResponsesBody) -> dict[str, Any]:
    """The options of the chat template. Raises `RequestError`."""
    options = chat_options(body)
    options.pop("tools", None)
    if body.tools:
        options["tools"] = read_tools(body.tools)
    reasoning = body.reasoning or {}
    check_keys(reasoning, "reasoning", ("effort",), ("summary", "generate_summary", "context", "mode"))
    effort = reasoning.get("effort")
    effort = None if effort is None else as_text(effort, "reasoning['effort']")
    thinks = False if effort == "none" else None
    variables = template_variables(served, body.chat_template, effort=effort, thinks=thinks)
    if variables:
        options["chat_template_kwargs"] = variables | (body.chat_template_kwargs or {})
    return options


def read_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Tools in the form of chats. Raises `RequestError` for tools that a server would have to run."""
    return [_read_tool(as_object(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(tools)]


def read_choice(choice: Any) -> Any:
    """`tool_choice` in the form of chats. Raises `RequestError`."""
    if choice is None or isinstance(choice, str):
        return choice
    given = as_object(choice, "tool_choice", '"auto", "none", "required" or {"type": "function", "name": ...}')
    choose(given.get("type"), "tool_choice['type']", ("function",), "Send the tools alone that may be called.")
    check_keys(given, "tool_choice", ("type", "name"))
    return {"type": "function", "function": {"name": as_text(given.get("name"), "tool_choice['name']")}}


def read_form(body: ResponsesBody) -> dict[str, Any] | None:
    """The structured outputs that a body asks for. Raises `RequestError`."""
    config = body.text or {}
    check_keys(config, "text", ("format",), ("verbosity",))
    if config.get("format") is None:
        return None
    given, place = as_object(config["format"], "text['format']"), "text['format']"
    kind = choose(given.get("type"), f"{place}['type']", ("text", "json_object", "json_schema"))
    check_keys(given, place, ("type", "schema"), ("name", "description", "strict"))
    if kind != "json_schema":
        return form_of({"response_format": {"type": kind}})
    schema = as_object(given.get("schema"), f"{place}['schema']", "a JSON schema")
    return form_of({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})


def read_limits(body: ResponsesBody) -> dict[str, Any]:
    """The sampling parameters of fields that have other names here. Raises `RequestError`."""
    if body.n not in (None, 1):
        raise RequestError.for_field("n", body.n, "1, or left out: a response has one answer")
    for i, name in enumerate(as_list(body.include or [], "include")):
        choose(name, f"include[{i}]", _INCLUDABLE)
    if body.top_logprobs and not body.includes_logprobs:
        bound = f"given with include=[{_INCLUDES_LOGPROBS!r}]"
        raise RequestError.for_field("top_logprobs", body.top_logprobs, bound)
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.includes_logprobs else {}
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise RequestError.for_field("max_output_tokens", body.max_output_tokens, "at least 1, or left out")
        if body.max_tokens not in (None, body.max_output_tokens):
            bound = f"max_output_tokens, which is {body.max_output_tokens}"
            raise RequestError.for_field("max_tokens", body.max_tokens, bound, "Give one of them.")
        more["max_tokens"] = body.max_output_tokens
    return more


def _is_plain_system(message: dict[str, Any]) -> bool:
    return message["role"] == "system" and isinstance(message["content"], str)


def _read_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    hint = "Describe a tool that you run yourself as a function; this server runs none."
    choose(tool.get("type"), f"{place}['type']", ("function",), hint)
    check_keys(tool, place, _TOOL_KEYS, _TOOL_IGNORED)
    function: dict[str, Any] = {"name": as_text(tool.get("name"), f"{place}['name']")}
    if tool.get("description") is not None:
        function["description"] = as_text(tool["description"], f"{place}['description']")
    if tool.get("parameters") is not None:
        function["parameters"] = as_object(tool["parameters"], f"{place}['parameters']", "a JSON schema")
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}
