"""A call whose stream has typed events for the parts of its one answer: thinking, words, calls."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.chat.answers import join_pieces
from rollout_engine.serve.chat.call import Answer, ChatCall
from rollout_engine.serve.openai.shapes import of_versions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Events, Reply
from rollout_engine.sessions.samples import join_parts
from rollout_engine.text.formats.answer import AnswerPiece

_ABORTED = "The answer was ended before its end, by a request to abort it: send it again."


class PieceCall(ChatCall):
    """A call with one answer, which is streamed as events of a type each.

    A subclass makes the events: of the begin, of pieces, and of the end.
    """

    async def answer(self) -> Reply | Events:
        headers = {"request-id": self.asked.request_id}
        if self.request.stream:
            return Events(self.events(), headers, are_named=True, write_problem=self.write_problem)
        return Reply(await self.reply(), headers=headers)

    async def write(self, results: list[RequestOutput]) -> Any:
        [result] = results
        [sample] = result.outputs
        _check_ended(sample)
        return self.write_body(result, sample, self.read(result, [sample]))

    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> Any:
        raise AssertionError("its events are those of pieces")

    async def events(self) -> AsyncIterator[Any]:
        pieces: list[AnswerPiece] = []
        reader = None
        with self.generation() as generation:
            await self.start(generation)
            for event in self.write_start():
                yield event
            while (found := await generation.next()) is not None:
                output = found[1]
                if reader is None:
                    reader = self.reader.stream(output.prompt_token_ids)
                    for event in self.write_first(output):
                        yield event
                for sample in output.outputs:
                    _check_ended(sample)
                    self.streamed.setdefault(0, []).append(sample)
                    new = reader.feed(sample.token_ids, sample.text)
                    new += reader.end() if sample.finish_reason is not None else []
                    pieces += new
                    for event in self.write_sample(sample, new):
                        yield event
        for event in self._close(output, pieces):
            yield event

    def _close(self, output: RequestOutput, pieces: list[AnswerPiece]) -> list[Any]:
        """The events of the end. The session has the answer before any of them is sent."""
        parts = self.streamed[0]
        answer = Answer(join_pieces(pieces), self.streamed_call_ids())
        self.keep_answer(0, answer)
        events = list(self.write_end(output, join_parts(parts), answer))
        self.record(output, parts)
        return events

    def write_extras(self, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Fields of our own, as choices of chats have them: seed, versions, and token ids if they are asked for."""
        extras = {"seed": sample.seed, **of_versions(sample, self.served.weight_version)}
        if self.asked.body.return_token_ids:
            extras |= {"prompt_token_ids": result.prompt_token_ids, "token_ids": sample.token_ids}
        return extras

    def count_thinking(self, sample: CompletionOutput, answer: Answer) -> int:
        """Tokens of a whole sample that are thinking, its tags included."""
        return self.reader.count_thinking(sample.token_ids, answer.parts)

    @abstractmethod
    def write_body(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""

    def write_start(self) -> Iterable[Any]:
        """The events before anything is computed."""
        return ()

    def write_first(self, output: RequestOutput) -> Iterable[Any]:
        """The events before those of the first output, whose prompt has been computed."""
        return ()

    @abstractmethod
    def write_sample(self, sample: CompletionOutput, pieces: list[AnswerPiece]) -> Iterable[Any]:
        """The events of new tokens, which complete these pieces."""

    @abstractmethod
    def streamed_call_ids(self) -> list[str]:
        """The ids that the streamed calls were given."""

    @abstractmethod
    def write_end(self, result: RequestOutput, sample: CompletionOutput, answer: Answer) -> Iterable[Any]:
        """The events of the end. `result`: the last output; `sample` is whole."""

    @abstractmethod
    def write_problem(self, problem: BaseException) -> Any:
        """The event of an error behind others."""


def _check_ended(sample: CompletionOutput) -> None:
    """Raise `HttpProblem` 503 for an answer that was aborted: its dialect has no word for this."""
    if sample.finish_reason == "abort":
        raise HttpProblem(503, _ABORTED if sample.error is None else f"The answer was cut short: {sample.error}")
