"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect of conversations."""

import uuid
from collections.abc import Iterable
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.anthropic.blocks import BlockEvents, write_blocks
from rollout_engine.serve.anthropic.body import (
    MessagesBody,
    PromptFields,
    hides_thinking,
    read_budget,
    read_choice,
    read_form,
    read_prompt,
)
from rollout_engine.serve.chat.answers import AnswerReader
from rollout_engine.serve.chat.call import Answer
from rollout_engine.serve.chat.piece_call import PieceCall
from rollout_engine.serve.chat.request import ChatRequest, without_hidden_tools
from rollout_engine.serve.chat.tools import RequestTools
from rollout_engine.serve.problems import problem_body
from rollout_engine.serve.prompt_bounds import check_text_size
from rollout_engine.serve.request_templates import with_rendered_text
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.answer import AnswerPiece


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Answer a conversation in Anthropic's dialect."""
    body: MessagesBody = asked.body
    lora = await served.adapter_of(body.model)
    read = run_in_thread if body.tools else asked.read_fields  # the template is asked for the form of calls
    return await (await read(_MessagesCall, served, asked, lora)).answer()


async def count_tokens(served: Served, asked: Asked) -> Reply:
    """The number of tokens of a conversation as a prompt, in Anthropic's dialect."""
    body: PromptFields = asked.body
    await served.adapter_of(body.model)
    read_budget(body)
    messages, options = await run_in_thread(read_prompt, served, body)
    choice, _ = read_choice(body.tool_choice)
    options = await run_in_thread(without_hidden_tools, served, messages, options, choice)
    prompt = await with_rendered_text(served, {"messages": messages, **options})
    check_text_size(served, prompt)
    token_ids = await asked.read_texts(served.engine.frontend.inputs.token_ids_of, prompt)
    return Reply({"input_tokens": len(token_ids)}, headers={"request-id": asked.request_id})


class _MessagesCall(PieceCall):
    call_prefix = "toolu_"

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: MessagesBody = asked.body
        self._id, self._body = f"msg_{uuid.uuid4().hex[:24]}", body
        self._stops = body.stop_sequences or []
        messages, options = read_prompt(served, body)
        tools, (choice, is_single) = options.get("tools"), read_choice(body.tool_choice)
        parser = RequestTools.of(served, tools, choice, body.chat_template, is_single=is_single)
        form = read_form(body)
        request = ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            options=without_hidden_tools(served, messages, options, choice),
            settings=_settings(served, body, parser, form),
            stream=bool(body.stream),
            model=body.model,
            cache_salt=body.cache_salt,
            priority=body.priority,
            session_id=body.session_id,
            request_id=body.request_id,
        )
        reader = AnswerReader(
            served,
            parser,
            body.chat_template,
            splits_thinking=True,
            is_bound=form is not None,
            skip_special_tokens=request.settings.params.skip_special_tokens,
        )
        super().__init__(served, asked, lora, request, reader)
        self._blocks = BlockEvents(self.make_call_id, hides_thinking=hides_thinking(body))

    def write_body(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> dict[str, Any]:
        content = write_blocks(answer, hides_thinking=hides_thinking(self._body))
        usage = self._usage(result, len(sample.token_ids), self.count_thinking(sample, answer))
        stop = self._stop(result, sample, answer)
        return {**self._head(content), **stop, "usage": usage, **self.write_extras(result, sample)}

    def write_first(self, output: RequestOutput) -> Iterable[Any]:
        head = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(output, 0, 0)}
        return {"type": "message_start", "message": head}, {"type": "ping"}

    def write_sample(self, sample: CompletionOutput, pieces: list[AnswerPiece]) -> Iterable[Any]:
        return [event for piece in pieces for event in self._blocks.write(piece)]

    def streamed_call_ids(self) -> list[str]:
        return self._blocks.call_ids

    def write_end(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> Iterable[Any]:
        yield from self._blocks.close()
        usage = self._usage(result, len(sample.token_ids), self.count_thinking(sample, answer))
        delta, extras = self._stop(result, sample, answer), self.write_extras(result, sample)
        yield {"type": "message_delta", "delta": delta, "usage": usage, **extras}
        yield {"type": "message_stop"}

    def write_problem(self, problem: BaseException) -> Any:
        return problem_body(problem, "anthropic")

    def _head(self, content: list[Any]) -> dict[str, Any]:
        model = self.lora or self.served.model
        return {"id": self._id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _stop(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if sample.finish_reason == "length":
            num_sampled = len(sample.token_ids)  # a session may allow fewer than are asked for
            is_full = len(result.prompt_token_ids) + num_sampled >= self.served.max_model_len
            is_cut = is_full and num_sampled < self._body.max_tokens
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif answer.call_ids:
            reason = "tool_use"
        elif sample.stop_reason in self._stops:
            reason, sequence = "stop_sequence", sample.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, output: RequestOutput, num_sampled: int, num_thinking: int) -> dict[str, Any]:
        """Cached tokens of the prompt are counted apart from the others, as Anthropic does."""
        return {
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens,
            "output_tokens": num_sampled,
            "output_tokens_details": {"thinking_tokens": num_thinking},
        }


def _settings(served: Served, body: MessagesBody, tools: RequestTools | None, form: dict[str, Any] | None) -> Settings:
    more = read_budget(body)
    if body.n not in (None, 1):
        raise RequestError.for_field("n", body.n, "1, or left out: a message has one answer")
    if body.stop_sequences is not None:
        if body.stop is not None:
            raise RequestError.for_field("stop", body.stop, "absent with stop_sequences")
        more["stop"] = body.stop_sequences
    if tools is not None and tools.structured_outputs is not None:
        if form is not None:
            bound = "without a format: tool_choice or a strict tool binds the answer already"
            raise RequestError.for_field("output_config['format']", "json_schema", bound)
        more["structured_outputs"] = tools.structured_outputs
    elif form is not None:
        more["structured_outputs"] = form
    return served.settings.read(body, output_kind="delta" if body.stream else "final_only", **more)
