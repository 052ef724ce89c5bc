"""POST /v1/responses: OpenAI's items in, items out."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.chat.answers import AnswerReader
from rollout_engine.serve.chat.call import Answer
from rollout_engine.serve.chat.piece_call import PieceCall
from rollout_engine.serve.chat.request import ChatRequest, without_hidden_tools
from rollout_engine.serve.chat.tools import RequestTools
from rollout_engine.serve.openai.logprobs import chat_logprobs
from rollout_engine.serve.openai.response_body import (
    ResponsesBody,
    read_choice,
    read_conversation,
    read_form,
    read_limits,
    read_options,
    with_instructions,
)
from rollout_engine.serve.openai.response_output import ItemEvents
from rollout_engine.serve.problems import problem_body
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.text.formats.answer import AnswerParts, AnswerPiece


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Answer a conversation of items; nothing is stored, but in a session."""
    body: ResponsesBody = asked.body
    lora = await served.adapter_of(body.model)
    read = run_in_thread if body.tools else asked.read_fields  # the template is asked for the form of calls
    return await (await read(_ResponsesCall, served, asked, lora)).answer()


class _ResponsesCall(PieceCall):
    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: ResponsesBody = asked.body
        self._id, self._body, self._number = f"resp_{uuid.uuid4().hex}", body, 0
        known = None if asked.session is None else asked.session.known_responses
        self._earlier, self._new = read_conversation(served, body, known)
        messages = with_instructions(body.instructions, [*self._earlier, *self._new])
        options, choice = read_options(served, body), read_choice(body.tool_choice)
        is_single = body.parallel_tool_calls is False
        parser = RequestTools.of(served, options.get("tools"), choice, body.chat_template, is_single=is_single)
        form = read_form(body)
        request = ChatRequest(
            messages=messages,
            tools=options.get("tools"),
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
        self._items = ItemEvents(self.make_call_id, seals_thinking=body.includes_thinking)
        self._rows: list[Any] = []
        """Log-probs of the tokens that were streamed, if they are asked for."""
        self._num_sent: int | None = None
        """Tokens whose log-probs were sent, or are thinking; None before the first words."""

    def record(self, output: RequestOutput, parts: list[CompletionOutput]) -> None:
        super().record(output, parts)
        if self.asked.session is not None and self._body.store is not False:
            answer = self.write_message(self.read(output, parts))
            self.asked.session.known_responses.add(self._id, self._earlier, [*self._new, answer])

    def write_body(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> dict[str, Any]:
        """The response of a whole answer, whose items are those of its events."""
        calls = iter(answer.call_ids)
        items = ItemEvents(lambda *_: next(calls), seals_thinking=self._body.includes_thinking)
        parts, logprobs = answer.parts, self._text_logprobs(sample, answer)
        pieces = [] if parts.thinking is None else [AnswerPiece("thinking", parts.thinking)]
        pieces += [AnswerPiece("text", parts.text)] if parts.text else []
        for piece in (*pieces, *[AnswerPiece("call", call=call) for call in parts.calls]):
            list(items.write(piece, logprobs if piece.kind == "text" else []))
        list(items.close(status=_status(sample)))
        return self._whole(result, sample, answer, items.items)

    def write_start(self) -> Iterable[Any]:
        response = self._response("in_progress", [])
        kinds = "response.created", "response.in_progress"
        return [self._number_event({"type": kind, "response": response}) for kind in kinds]

    def write_sample(self, sample: CompletionOutput, pieces: list[AnswerPiece]) -> Iterable[Any]:
        if self._body.includes_logprobs:
            self._rows += self._rows_of(sample)
        for piece in pieces:
            logprobs = self._take_logprobs() if piece.kind == "text" else []
            for event in self._items.write(piece, logprobs):
                yield self._number_event(event)

    def _take_logprobs(self) -> list[Any]:
        """The log-probs of tokens behind the thinking that have not been sent."""
        if self._num_sent is None:
            token_ids = [token_id for part in self.streamed[0] for token_id in part.token_ids]
            self._num_sent = self.reader.count_thinking(token_ids, AnswerParts(self._items.thinking))
        rows, self._num_sent = self._rows[self._num_sent :], len(self._rows)
        return rows

    def streamed_call_ids(self) -> list[str]:
        return self._items.call_ids

    def write_end(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> Iterable[Any]:
        status = _status(sample)
        for event in self._items.close(status=status, logprobs=self._take_logprobs()):
            yield self._number_event(event)
        response = self._whole(result, sample, answer, self._items.items)
        yield self._number_event({"type": f"response.{status}", "response": response})

    def write_problem(self, problem: BaseException) -> Any:
        said = problem_body(problem, "openai")["error"]
        error = {"code": "server_error", "message": said["message"]}
        response = self._response("failed", self._items.items, error=error)
        return self._number_event({"type": "response.failed", "response": response})

    def _number_event(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _rows_of(self, sample: CompletionOutput) -> list[Any]:
        as_ids = self.served.names_token_ids(None)
        rows: list[Any] = chat_logprobs(self.served, sample, as_ids=as_ids)["content"]
        return rows

    def _text_logprobs(self, sample: CompletionOutput, answer: Answer) -> list[Any]:
        """Log-probs of a whole sample's tokens behind its thinking."""
        return self._rows_of(sample)[self.count_thinking(sample, answer) :] if self._body.includes_logprobs else []

    def _whole(
        self, result: RequestOutput, sample: CompletionOutput, answer: Answer, items: list[Any]
    ) -> dict[str, Any]:
        status, num_prompt, num_sampled = _status(sample), len(result.prompt_token_ids), len(sample.token_ids)
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": result.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": self.count_thinking(sample, answer)},
            "total_tokens": num_prompt + num_sampled,
        }
        more: dict[str, Any] = {"usage": usage}
        if status == "completed":
            more["completed_at"] = int(time.time())
        else:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(status, items, **more) | self.write_extras(result, sample)

    def _response(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        body, params = self._body, self.settings.params
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.lora or self.served.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {},
            "store": self.asked.session is not None and body.store is not False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        return response | more


def _status(sample: CompletionOutput) -> str:
    return "incomplete" if sample.finish_reason == "length" else "completed"


def _settings(served: Served, body: ResponsesBody, tools: RequestTools | None, form: dict[str, Any] | None) -> Settings:
    more = read_limits(body)
    if tools is not None and tools.structured_outputs is not None:
        if form is not None:
            bound = "of plain text: tool_choice or a strict tool binds the answer already"
            raise RequestError.for_field("text['format']", "JSON", bound)
        more["structured_outputs"] = tools.structured_outputs
    elif form is not None:
        more["structured_outputs"] = form
    return served.settings.read(body, output_kind="delta" if body.stream else "final_only", **more)
