"""A call of a dialect of conversations: its prompt, the reading of its answers, and its place in a session.

    without a session    the chat template's prompt                  nothing is kept
    in a session         `begin` gives prompt and settings           `record` before the client has all of an answer

A subclass reads a body into a `ChatRequest` and writes answers in its dialect's shape.
"""

import json
from typing import Any

import msgspec

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.call import Call, salt_of
from rollout_engine.serve.chat.answers import AnswerReader
from rollout_engine.serve.chat.request import ChatRequest
from rollout_engine.serve.generation import Generation
from rollout_engine.serve.request_templates import with_rendered_text
from rollout_engine.serve.route import Asked
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served
from rollout_engine.sessions.samples import join_parts
from rollout_engine.text.formats.answer import AnswerParts


class Answer(msgspec.Struct):
    """A whole answer, with the ids that its calls have for the client."""

    parts: AnswerParts
    call_ids: list[str]


class ChatCall(Call):
    """One call that answers a conversation."""

    settings: Settings
    call_prefix = "call_"
    """The beginning of the ids of calls."""

    def __init__(
        self,
        served: Served,
        asked: Asked,
        lora: str | None,
        request: ChatRequest,
        reader: AnswerReader,
        prompt: dict[str, Any] | None = None,
    ) -> None:
        """`prompt`: in place of the one that the chat template makes of the request."""
        super().__init__(served, asked, lora)
        self.request, self.reader, self.settings = request, reader, request.settings
        self.prompts = [request.prompt if prompt is None else prompt]
        self.streamed: dict[int, list[CompletionOutput]] = {}
        """Index of a sample -> its parts that were streamed."""
        self._answers: dict[int, Answer] = {}
        self._num_calls = sum(len(each.get("tool_calls") or ()) for each in request.messages if isinstance(each, dict))
        """Calls of the conversation so far."""

    def generation(self) -> Generation:
        return Generation(self.served, self.asked, self.request.request_id)

    async def start(self, generation: Generation) -> None:
        request, session = self.request, self.asked.session
        if session is not None:
            given = request.messages, request.options, request.settings
            prompt, settings = await session.begin(*given, lora=self.lora)
            self.settings = _fit(settings, self.served.max_model_len - len(prompt["prompt_token_ids"]))
            prompt |= salt_of(request)
        else:
            prompt = self.prompts[0]
            prompt = await with_rendered_text(self.served, prompt, must_show_tools=request.must_show_tools)
        self.prompts = [prompt]
        kept_near = request.session_id if session is None else None  # a session's requests have its own replica
        options: dict[str, Any] = {"priority": request.priority, "session_id": kept_near, "lora": self.lora}
        await generation.start(self.prompts, self.settings, **options)

    async def reply(self) -> Any:
        with self.generation() as generation:
            await self.start(generation)
            results = await generation.results()
        body = await self.write(results)
        for sample in results[0].outputs:
            self.record(results[0], [sample])
        return body

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        for sample in output.outputs:
            parts = self.streamed.setdefault(sample.index, [])
            parts.append(sample)
            if sample.finish_reason is not None:
                self.record(output, parts)

    def record(self, output: RequestOutput, parts: list[CompletionOutput]) -> None:
        """Have the session keep a sample that has ended; without one, do nothing.

        `parts`: the sample, or all its outputs of a stream.
        """
        if self.asked.session is not None:
            self.asked.session.record(parts, self.write_message(self.read(output, parts)))

    def read(self, output: RequestOutput, parts: list[CompletionOutput]) -> Answer:
        """The answer in a whole sample, or in its outputs of a stream; the same each time."""
        index = parts[0].index
        answer = self._answers.get(index)
        if answer is None:
            sample = join_parts(parts)
            found = self.reader.read(output.prompt_token_ids, sample.token_ids, sample.text)
            answer = self._answers[index] = Answer(
                found, [self.make_call_id(call.name, index) for index, call in enumerate(found.calls)]
            )
        return answer

    def keep_answer(self, index: int, answer: Answer) -> None:
        """Set the answer of a sample that was streamed in pieces: `read` returns it."""
        self._answers[index] = answer

    def make_call_id(self, name: str, index: int) -> str:
        """An id of the answer's call number `index`, in the form that the chat template wants to have it back."""
        call_id = self.reader.new_call_id(name, self._num_calls + index)
        return f"{self.call_prefix}{call_id[5:]}" if call_id.startswith("call_") else call_id

    def write_message(self, answer: Answer) -> dict[str, Any]:
        """The message of an answer as a later request brings it back, in the engine's words."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.parts.text}
        if answer.parts.thinking is not None:
            message["reasoning_content"] = answer.parts.thinking
        calls = write_calls(answer)
        return message | {"tool_calls": calls} if calls else message


def _fit(settings: Settings, room: int) -> Settings:
    """The settings with no more tokens than there is room for: agents ask for those of other models."""
    params = settings.params
    if params.max_tokens is None or not 1 <= room < params.max_tokens:
        return settings
    return settings._replace(params=params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room)))


def write_calls(answer: Answer) -> list[dict[str, Any]]:
    """The calls of an answer as OpenAI writes them: their arguments are JSON text."""
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
        }
        for call_id, call in zip(answer.call_ids, answer.parts.calls, strict=True)
    ]


def write_arguments(arguments: dict[str, Any]) -> str:
    """The arguments of a call as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)
