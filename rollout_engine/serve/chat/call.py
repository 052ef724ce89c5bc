"""A call of a dialect of conversations: its prompt, the reading of its answers, and its place in a session.

    without a session    the chat template's prompt                   nothing is kept
    in a session         `begin` gives place and prompt               `record` before the client has all of an answer,
                                                                      `cancel` if it never has

A subclass reads a body into a `ChatRequest` and writes answers in its dialect's shape.
"""

import json
import uuid
from typing import Any

import msgspec

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.call import Call
from rollout_engine.serve.chat.answer_parts import AnswerParts
from rollout_engine.serve.chat.answers import AnswerReader
from rollout_engine.serve.chat.joined_samples import join_output
from rollout_engine.serve.chat.request import ChatRequest
from rollout_engine.serve.generation import Generation
from rollout_engine.serve.request_templates import with_rendered_text
from rollout_engine.serve.route import Asked
from rollout_engine.serve.sampling import SamplingFields, Settings
from rollout_engine.serve.served import Served


class Answer(msgspec.Struct):
    """A whole answer, with the ids that its calls have for the client."""

    parts: AnswerParts
    call_ids: list[str]


def read_settings(served: Served, asked: Asked, **more: Any) -> Settings:
    """The settings of a body, and `more` of them; in a session with log-probs. Raises `RequestError`."""
    fields: SamplingFields = asked.body
    if asked.session is not None:
        more.setdefault("logprobs", 0)
    return served.settings.read(fields, **more)


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
        self._place: Any = None
        self.is_open = False
        """Whether the session waits for the result of `_place`."""

    def generation(self) -> Generation:
        return Generation(self.served, self.asked, self.request.request_id)

    async def start(self, generation: Generation) -> None:
        request, session = self.request, self.asked.session
        if session is not None:
            self._place, prompt = await session.begin(request)
            self.is_open, self.settings = True, request.settings
        else:
            prompt = self.prompts[0]
            prompt = await with_rendered_text(self.served, prompt, must_show_tools=request.must_show_tools)
        self.prompts = [prompt]
        options: dict[str, Any] = {"priority": request.priority, "session_id": request.session_id, "lora": self.lora}
        await generation.start(self.prompts, self.settings, **options)

    async def reply(self) -> Any:
        try:
            with self.generation() as generation:
                await self.start(generation)
                results = await generation.results()
            body = await self.write(results)
            self.record(results[0])
            return body
        finally:
            self.end()

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        for sample in output.outputs:
            self.streamed.setdefault(sample.index, []).append(sample)
        if output.finished:
            self.record(join_output(output, self.streamed))

    def record(self, result: RequestOutput) -> None:
        """Have the session keep a whole result; without one, do nothing."""
        if self.is_open:
            answers = [self.write_message(self.read(result, sample)) for sample in result.outputs]
            self.asked.session.record(self._place, result, answers)
            self.is_open = False

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.asked.session.cancel(self._place)

    def read(self, output: RequestOutput, sample: CompletionOutput) -> Answer:
        """The parts of a whole sample; the same each time."""
        answer = self._answers.get(sample.index)
        if answer is None:
            parts = self.reader.read(output.prompt_token_ids, sample.token_ids, sample.text)
            answer = self._answers[sample.index] = Answer(parts, [self.make_call_id() for _ in parts.calls])
        return answer

    def keep_answer(self, index: int, answer: Answer) -> None:
        """Set the answer of a sample that was streamed in pieces: `read` returns it."""
        self._answers[index] = answer

    def make_call_id(self) -> str:
        """A new id of a call."""
        return f"{self.call_prefix}{uuid.uuid4().hex[:24]}"

    def write_message(self, answer: Answer) -> dict[str, Any]:
        """The message of an answer as a later request brings it back, in the engine's words."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.parts.text}
        if answer.parts.thinking is not None:
            message["reasoning_content"] = answer.parts.thinking
        calls = write_calls(answer)
        return message | {"tool_calls": calls} if calls else message


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
