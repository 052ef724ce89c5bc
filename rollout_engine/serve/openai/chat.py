"""POST /v1/chat/completions: the next message of a conversation."""

from collections.abc import Callable, Sequence
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.call import GenerationFields, salt_of
from rollout_engine.serve.chat.answers import AnswerReader, join_pieces
from rollout_engine.serve.chat.call import Answer, ChatCall, write_calls
from rollout_engine.serve.chat.effort import template_variables
from rollout_engine.serve.chat.request import ChatRequest, must_show_tools, without_hidden_tools
from rollout_engine.serve.chat.tools import RequestTools
from rollout_engine.serve.openai.logprobs import chat_logprobs
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import (
    matched_stop,
    of_versions,
    sampled_fields,
    sglang_metadata,
    total_usage,
)
from rollout_engine.serve.request_templates import brings_template, chat_options
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.chat_turns import ChatTurns, RewrittenTurns, once_followed
from rollout_engine.text.conversations import as_messages
from rollout_engine.text.formats.answer import AnswerParts, AnswerStream


class ChatBody(GenerationFields, kw_only=True):
    """Fields of a request."""

    messages: list[Any]
    tools: list[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tool_choice: Any = None
    """ "none": the prompt describes the tools anyway, and calls in the answer stay text."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    """For chat templates that read it."""
    separate_reasoning: bool | None = None
    """Give thinking as `reasoning_content`, apart from the content; None: the server's own way."""
    required_prefix_token_ids: list[int] | None = None
    """The conversation so far as it was sampled: the prompt is these ids, and behind them the messages after the last
    answer. No answer is tokenized again."""


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Answer a conversation."""
    body: ChatBody = asked.body
    lora = await served.adapter_of(body.model)
    asks_template = bool(body.tools) and not must_show_tools(body.tool_choice)
    renders = asks_template or body.required_prefix_token_ids is not None  # a conversation, several times
    call = await (run_in_thread if renders else asked.read_fields)(_OpenAIChat, served, asked, lora)
    return await call.answer()


class _OpenAIChat(ChatCall):
    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: ChatBody = asked.body
        self._body, self._id = body, f"chatcmpl-{body.request_id or asked.request_id}"
        self._first_fields: dict[str, Any] = {}
        """Further fields of the first event."""
        _check_prefix(served, asked)
        tools = RequestTools.of(served, body.tools, body.tool_choice, body.chat_template)
        settings = _settings(served, body, tools)
        variables = template_variables(served, body.chat_template, effort=body.reasoning_effort, thinks=None)
        given = chat_options(body)
        if variables:
            given["chat_template_kwargs"] = variables | (body.chat_template_kwargs or {})
        options = without_hidden_tools(served, body.messages, given, body.tool_choice)
        request = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            tool_choice=body.tool_choice,
            options=options,
            settings=settings,
            stream=bool(body.stream),
            model=body.model,
            cache_salt=body.cache_salt,
            priority=body.priority,
            session_id=body.session_id,
            request_id=body.request_id,
        )
        prompt = None
        if body.required_prefix_token_ids is not None:
            token_ids = _prompt_after(served, body.required_prefix_token_ids, body.messages, options)
            prompt = {"prompt_token_ids": token_ids, **salt_of(body)}
        splits = body.separate_reasoning
        self._splits = served.options.separate_reasoning if splits is None else splits
        """Whether thinking is apart, and answers are streamed in pieces."""
        reader = AnswerReader(
            served,
            tools,
            body.chat_template,
            splits_thinking=self._splits,
            skip_special_tokens=settings.params.skip_special_tokens,
        )
        self._streams: dict[int, _Deltas] = {}
        """Index of a sample -> its pieces."""
        super().__init__(served, asked, lora, request, reader, prompt)

    async def write(self, results: list[RequestOutput]) -> dict[str, Any]:
        [result] = results
        choices = [self._choice(result, sample) for sample in result.outputs]
        version = max(choice["weight_version"] for choice in choices)
        more: dict[str, Any] = {"weight_version": version, **sglang_metadata(self.served, version)}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = result.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = await prompt_rows(self.served, result)
        return self.write_head(self._id, "chat.completion", choices, {"usage": total_usage(results), **more})

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        for sample in output.outputs if self._splits else ():
            if sample.index not in self._streams:
                self._streams[sample.index] = _Deltas(self.reader.stream(output.prompt_token_ids), self.make_call_id)
            self._streams[sample.index].feed(sample)
            if sample.finish_reason is not None:
                self.keep_answer(sample.index, self._streams[sample.index].answer)
        await super().prepare_output(index, output)
        if not self.outputs and self._body.prompt_logprobs is not None:
            self._first_fields = {"prompt_logprobs": await prompt_rows(self.served, output)}

    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """A chunk. With tools, the words of an answer are sent once it has ended: a call among them is no text."""
        [sample] = samples
        choice = self._chunk(output, sample)
        more, self._first_fields = usage | self._first_fields, {}
        return self.write_head(self._id, "chat.completion.chunk", [choice], more)

    def write_last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self.write_head(self._id, "chat.completion.chunk", [], usage)

    def write_message(self, answer: Answer) -> dict[str, Any]:
        return {"role": "assistant", **_message(answer)}

    def _choice(self, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        answer = self.read(result, [sample])
        choice = self._common(sample, bool(answer.call_ids)) | sampled_fields(sample, result)
        choice["message"] = {**_message(answer), "role": "assistant"}
        if self._body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": result.prompt_token_ids}
        return choice

    def _chunk(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        parts = self.streamed[sample.index]
        is_first, has_calls = sample is parts[0], False
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if self._splits:
            delta |= self._streams[sample.index].delta
            has_calls = bool(self._streams[sample.index].answer.call_ids)
        elif not self.reader.has_tools:
            delta["content"] = sample.text
        elif sample.finish_reason is not None:
            answer = self.read(output, parts)
            has_calls = bool(answer.call_ids)
            delta |= _message(answer)
            if has_calls:
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        choice = self._common(sample, has_calls) | sampled_fields(sample, output)
        choice["delta"] = delta
        if self._body.return_token_ids:
            prompt_token_ids = output.prompt_token_ids if is_first else None
            choice |= {"token_ids": sample.token_ids, "prompt_token_ids": prompt_token_ids}
        return choice

    def _common(self, sample: CompletionOutput, has_calls: bool) -> dict[str, Any]:
        as_ids = self.served.names_token_ids(self._body.return_tokens_as_token_ids)
        return {
            "index": sample.index,
            "logprobs": chat_logprobs(self.served, sample, as_ids=as_ids) if self._body.logprobs else None,
            "finish_reason": "tool_calls" if has_calls and sample.finish_reason == "stop" else sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "matched_stop": matched_stop(sample),
            "seed": sample.seed,
            **of_versions(sample, self.served.weight_version),
        }


class _Deltas:
    """One sample that is streamed in pieces, and the fields of its next event."""

    def __init__(self, stream: AnswerStream, make_call_id: Callable[[str, int], str]) -> None:
        self._stream, self._make_call_id = stream, make_call_id
        self.answer = Answer(AnswerParts(), [])
        """The answer so far."""
        self.delta: dict[str, Any] = {}
        """The fields of the last output's event."""

    def feed(self, sample: CompletionOutput) -> None:
        """Take the next output of the sample."""
        pieces = self._stream.feed(sample.token_ids, sample.text)
        pieces += self._stream.end() if sample.finish_reason is not None else []
        new, ids = join_pieces(pieces), self.answer.call_ids
        first = len(ids)
        ids += [self._make_call_id(call.name, first + index) for index, call in enumerate(new.calls)]
        parts = self.answer.parts
        if new.thinking is not None:
            parts.thinking = (parts.thinking or "") + new.thinking
        parts.text += new.text
        parts.found += new.calls
        delta: dict[str, Any] = {} if new.thinking is None else {"reasoning_content": new.thinking}
        if new.text or (new.thinking is None and not new.calls):
            delta["content"] = new.text
        if new.calls:
            calls = write_calls(Answer(new, ids[first:]))
            delta["tool_calls"] = [{"index": first + index, **call} for index, call in enumerate(calls)]
        self.delta = delta


def _message(answer: Answer) -> dict[str, Any]:
    """The fields of an answer's message but its role."""
    parts = answer.parts
    thinking = {} if parts.thinking is None else {"reasoning_content": parts.thinking}
    if answer.call_ids:
        return {**thinking, "content": parts.text or None, "tool_calls": write_calls(answer)}
    return {**thinking, "content": parts.text}


def _check_prefix(served: Served, asked: Asked) -> None:
    """Raise `RequestError` for a required prefix that other fields do not allow."""
    body: ChatBody = asked.body
    prefix = body.required_prefix_token_ids
    if brings_template(served, body.chat_template) and prefix is not None:
        bound = "absent with required_prefix_token_ids: later turns are rendered by the tokenizer's own template"
        raise RequestError.for_field("chat_template", body.chat_template, bound)
    if asked.has_pictures and prefix is not None:
        bound = "absent from conversations with pictures"
        hint = "Send the sampled ids as token_ids to /inference/v1/generate, with multi_modal_data."
        raise RequestError.for_field("required_prefix_token_ids", prefix[:8], bound, hint)
    if asked.session is not None and prefix is not None:
        bound = "absent in a session, which keeps the sampled ids itself"
        raise RequestError.for_field("required_prefix_token_ids", prefix[:8], bound)


def _settings(served: Served, body: ChatBody, tools: RequestTools | None) -> Settings:
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


def _prompt_after(served: Served, prefix: Sequence[int], messages: Sequence[Any], options: dict[str, Any]) -> list[int]:
    """Token ids of a conversation that begins with `prefix`: its last answer and all before, as sampled.

    The messages after the last answer follow as the chat template writes them. Raises `RequestError` if there is no
    answer, nothing after it, or a template that rewrites earlier turns.
    """
    listed = as_messages(list(messages))
    answered = [index for index, message in enumerate(listed) if message["role"] == "assistant"]
    new = listed[answered[-1] + 1 :] if answered else []
    if not prefix or not new:
        bound = "given with messages that have an answer, and at least one message after it"
        raise RequestError.for_field("required_prefix_token_ids", list(prefix)[:8], bound)
    turns, past = ChatTurns(served.codec, **options), listed[: answered[-1]]
    opened = turns.text(past) if past else None
    sampled, roles = served.codec.decode(served.codec.without_end(prefix)), [message["role"] for message in new]
    try:
        if opened is not None and sampled.startswith(opened):
            said = sampled[len(opened) :]
            return [*prefix, *turns.between(opened, turns.text([*past, turns.message(said), *new]), said, prefix)]
        rewriting = turns.rewriting(roles)  # earlier answers differ from the messages: the sampled tokens are not known
    except RewrittenTurns as problem:
        rewriting = once_followed(roles, problem.how)
    if rewriting is not None:
        what = f"the chat template rewrites earlier turns ({rewriting})"
        raise RequestError(f"required_prefix_token_ids cannot be kept: {what}.", field="required_prefix_token_ids")
    return [*prefix, *turns.glue(new, prefix)]
