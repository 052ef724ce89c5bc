"""POST /v1/chat/completions: the next message of a conversation."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.generation import Generation, failed
from rollout_engine.serve.openai.chat_fields import chat_options
from rollout_engine.serve.openai.logprobs import chat_logprobs
from rollout_engine.serve.openai.prefixes import prompt_after
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import (
    StreamOptions,
    matched_stop,
    now,
    of_versions,
    sglang_metadata,
    total_usage,
)
from rollout_engine.serve.openai.tools import ToolParser
from rollout_engine.serve.request_templates import brings_template, with_rendered_text
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import SamplingFields, Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.conversations import as_messages


class ChatBody(SamplingFields, kw_only=True):
    """Fields of a request."""

    messages: list[Any]
    model: str | None = None
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tool_choice: Any = None
    """ "none": the prompt describes the tools all the same, and calls in the answer stay text."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    required_prefix_token_ids: list[int] | None = None
    """The conversation so far as it was sampled: the prompt is these ids, and behind them the messages after the last
    answer. No answer is tokenized again."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Answer a conversation."""
    body: ChatBody = asked.body
    lora = await served.adapter_of(body.model)
    asks_template = bool(body.tools) and not _must_show_tools(body)
    renders = asks_template or body.required_prefix_token_ids is not None  # a conversation, several times
    call = await (run_in_thread if renders else asked.read_fields)(_Call, served, asked, lora)
    if body.stream:
        return Events(call.events())
    return Reply(await call.reply())


class _Call:
    """One call: its settings, and how its outputs are written."""

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: ChatBody = asked.body
        self._served, self._asked, self._body, self._lora = served, asked, body, lora
        self._id, self._created = f"chatcmpl-{body.request_id or asked.request_id}", now()
        if brings_template(served, body.chat_template) and body.required_prefix_token_ids is not None:
            bound = "absent with required_prefix_token_ids: later turns are rendered by the tokenizer's own template"
            raise RequestError.for_field("chat_template", body.chat_template, bound)
        self._tools = ToolParser.of(served, body.tools, body.tool_choice, body.chat_template)
        self._settings = _settings(served, body, self._tools)
        self._prompt = _prompt(served, body)

    async def reply(self) -> dict[str, Any]:
        with Generation(self._served, self._asked, self._body.request_id) as generation:
            await self._start(generation)
            [result] = await generation.results()
        problem = failed(result)
        if problem is not None:
            raise problem
        choices = [self._choice(result, sample) for sample in result.outputs]
        version = max(choice["weight_version"] for choice in choices)
        more: dict[str, Any] = {"weight_version": version, **sglang_metadata(self._served, version)}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = result.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = await prompt_rows(self._served, result)
        return self._response("chat.completion", choices, {"usage": total_usage([result]), **more})

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks. With tools, the words of an answer come once it has ended: a call among them is no text."""
        body, last, num_sampled = self._body, None, 0
        asks = body.stream_options or StreamOptions()
        samples: dict[int, list[CompletionOutput]] = {}
        with Generation(self._served, self._asked, body.request_id) as generation:
            await self._start(generation)
            while (found := await generation.next()) is not None:
                _, output = found
                problem = failed(output)
                if problem is not None:
                    raise problem
                first: dict[str, Any] = {}
                if last is None and body.prompt_logprobs is not None:
                    first["prompt_logprobs"] = await prompt_rows(self._served, output)
                for sample in output.outputs:
                    so_far = samples.setdefault(sample.index, [])
                    choice = self._chunk(output, sample, so_far)
                    so_far.append(sample)
                    num_sampled += len(sample.token_ids)
                    usage = asks.usage_so_far(partial(total_usage, [output], True, num_sampled))
                    yield self._response("chat.completion.chunk", [choice], usage | first)
                    first = {}
                last = output
        if asks.include_usage and last is not None:
            yield self._response("chat.completion.chunk", [], {"usage": total_usage([last], True, num_sampled)})

    async def _start(self, generation: Generation) -> None:
        body = self._body
        options: dict[str, Any] = {"priority": body.priority, "session_id": body.session_id, "lora": self._lora}
        prompt = await with_rendered_text(self._served, self._prompt, must_show_tools=_must_show_tools(body))
        await generation.start([prompt], self._settings, **options)

    def _response(self, kind: str, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._lora or self._served.model}
        return {**head, "choices": choices, **more}

    def _choice(self, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        message, calls = self._message(result, sample.token_ids, sample.text)
        message["role"] = "assistant"
        choice = self._common(sample, bool(calls))
        choice["message"] = message
        if self._body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": result.prompt_token_ids}
        return choice

    def _chunk(self, output: RequestOutput, sample: CompletionOutput, so_far: list[CompletionOutput]) -> dict[str, Any]:
        delta: dict[str, Any] = {} if so_far else {"role": "assistant"}
        calls: list[dict[str, Any]] = []
        if self._tools is None:
            delta["content"] = sample.text
        elif sample.finish_reason is not None:
            parts = [*so_far, sample]
            token_ids = [each for part in parts for each in part.token_ids]
            message, calls = self._message(output, token_ids, "".join(part.text for part in parts))
            delta |= message
            if calls:
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        choice = self._common(sample, bool(calls))
        choice["delta"] = delta
        if self._body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": None if so_far else output.prompt_token_ids}
        return choice

    def _message(
        self, output: RequestOutput, token_ids: list[int], text: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(fields of the message, its calls) of a whole answer."""
        if self._tools is None:
            return {"content": text}, []
        calls, words = self._tools.split(output.prompt_token_ids, token_ids, text)
        return ({"content": words or None, "tool_calls": calls} if calls else {"content": text}), calls

    def _common(self, sample: CompletionOutput, has_calls: bool) -> dict[str, Any]:
        as_ids = self._served.names_token_ids(self._body.return_tokens_as_token_ids)
        return {
            "index": sample.index,
            "logprobs": chat_logprobs(self._served, sample, as_ids=as_ids) if self._body.logprobs else None,
            "finish_reason": "tool_calls" if has_calls and sample.finish_reason == "stop" else sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "matched_stop": matched_stop(sample),
            "seed": sample.seed,
            **of_versions(sample, self._served.weight_version),
        }


def _settings(served: Served, body: ChatBody, tools: ToolParser | None) -> Settings:
    if body.top_logprobs and not body.logprobs:
        raise RequestError.for_field("top_logprobs", body.top_logprobs, "given with logprobs=true")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise RequestError.for_field("max_completion_tokens", body.max_completion_tokens, "at least 1, or left out")
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        bound = f"max_completion_tokens, which is {body.max_completion_tokens}"
        raise RequestError.for_field("max_tokens", body.max_tokens, bound, "Give one of them.")
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
    if tools is not None and tools.structured_outputs is not None:
        more["structured_outputs"] = tools.structured_outputs
    return served.settings.read(body, output_kind="delta" if body.stream else "final_only", **more)


def _prompt(served: Served, body: ChatBody) -> dict[str, Any]:
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    options = chat_options(body)
    if "tools" in options and not _must_show_tools(body) and not brings_template(served, body.chat_template):
        if not served.codec.shows_tools(as_messages(body.messages), **options):
            del options["tools"]
    if body.required_prefix_token_ids is None:
        return {"messages": body.messages, **options, **salt}
    token_ids = prompt_after(served, body.required_prefix_token_ids, body.messages, options)
    return {"prompt_token_ids": token_ids, **salt}


def _must_show_tools(body: ChatBody) -> bool:
    """Whether the prompt has to show tools: not if a grammar forces the calls, or the client looks for them."""
    return body.tool_choice in (None, "auto")
