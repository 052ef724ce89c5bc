"""A call of a route that samples: the same steps for all of them, and their own way to write samples."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.generation import Generation
from rollout_engine.serve.openai.shapes import StreamOptions, now, total_usage
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import SamplingFields, Settings
from rollout_engine.serve.served import Served


class CallFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests that pool, or that have their sampling settings in one field."""

    model: str | None = None
    """The model, or one of its adapters."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields of every request of OpenAI's dialect that samples; its settings are fields too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Give the ids of the prompt and of the samples."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens as "token_id:7" in place of their texts."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


def salt_of(body: Any) -> dict[str, Any]:
    """The field of a prompt that keeps its KV apart from that of prompts with another salt."""
    return {} if body.cache_salt is None else {"cache_salt": body.cache_salt}


def media_of(body: Any) -> dict[str, Any]:
    """The field of a prompt that brings pictures."""
    return {} if body.multi_modal_data is None else {"multi_modal_data": body.multi_modal_data}


def text_prompt(text: str, body: Any) -> dict[str, Any]:
    """The prompt of a text, with the options of a body."""
    adds = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
    return {"prompt": text, **salt_of(body), **adds}


def prompts_of(given: str | list[Any], body: Any) -> list[dict[str, Any]]:
    """The prompts of a field with a text, token ids, or a list of such, in our own form."""
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [
        text_prompt(each, body) if isinstance(each, str) else {"prompt_token_ids": each, **salt_of(body)}
        for each in several
    ]


class Call(ABC):
    """One call of a route that samples. A subclass reads the body, in `__init__`, and writes answers and events.

    Its `prompts` and `settings` are queued together; each prompt has one result, or outputs of some tokens each if the
    answer is streamed.
    """

    prompts: Sequence[Any]
    settings: Settings | Sequence[Settings]
    repeats = False
    """Whether every choice of a prompt is answered with the prompt's log-probs."""
    counts_samples = True
    """Whether the usage has the sampled tokens."""
    joins_samples = False
    """Whether the samples of an output share an event; else each has one of its own."""

    def __init__(self, served: Served, asked: Asked, lora: str | None = None) -> None:
        """`lora`: the adapter of all prompts."""
        self.served, self.asked, self.lora, self.created = served, asked, lora, now()
        self.stream_options = getattr(asked.body, "stream_options", None) or StreamOptions()
        self.outputs: dict[int, RequestOutput] = {}
        """Index of a prompt -> its last output that was streamed."""
        self.num_sampled = 0
        """Tokens that were streamed."""

    async def answer(self) -> Reply | Events:
        """The response: all at once, or events."""
        return Events(self.events()) if self.asked.body.stream else Reply(await self.reply())

    async def reply(self) -> Any:
        """The body of a whole answer."""
        with self.generation() as generation:
            await self.start(generation)
            results = await generation.results()
        return await self.write(results)

    async def events(self) -> AsyncIterator[Any]:
        """The events of an answer, as the tokens are sampled."""
        options = self.stream_options
        with self.generation() as generation:
            await self.start(generation)
            while (found := await generation.next()) is not None:
                index, output = found
                await self.prepare_output(index, output)
                for samples in [output.outputs] if self.joins_samples else [[each] for each in output.outputs]:
                    self.num_sampled += sum(len(sample.token_ids) for sample in samples)
                    self.outputs[index] = output
                    yield self.write_event(index, output, samples, options.usage_so_far(self.usage_so_far))
        if options.include_usage:
            yield self.write_last_event({"usage": self.usage_so_far()})

    def generation(self) -> Generation:
        """The requests of this call, not yet queued."""
        return Generation(self.served, self.asked, self.asked.body.request_id)

    async def start(self, generation: Generation) -> None:
        """Queue the prompts. Raises `RequestError`, nothing queued."""
        body = self.asked.body
        options: dict[str, Any] = {"priority": body.priority, "session_id": body.session_id, "lora": self.lora}
        await generation.start(self.prompts, self.settings, repeats=self.repeats, **options)

    def usage_so_far(self) -> Any:
        """Tokens of the prompts and samples that were streamed."""
        return total_usage([*self.outputs.values()], self.counts_samples, self.num_sampled)

    async def prepare_output(self, index: int, output: RequestOutput) -> None:  # noqa: B027 (few calls need it)
        """Await the parts of the next event that take long to write."""

    @abstractmethod
    async def write(self, results: list[RequestOutput]) -> Any:
        """The body of a whole answer, of a result for each prompt."""

    @abstractmethod
    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> Any:
        """One event. `index`: of the prompt; `usage`: the field with the usage so far, if the client wants it."""

    def write_last_event(self, usage: dict[str, Any]) -> Any:
        """The event behind all others, without any sample; in a dialect without one of its own, the usage alone."""
        return usage

    def write_head(self, request_id: str, kind: str, choices: list[Any], more: dict[str, Any]) -> dict[str, Any]:
        """A response of OpenAI's dialect. `kind`: its "object"."""
        head = {"id": request_id, "object": kind, "created": self.created, "model": self.lora or self.served.model}
        return {**head, "choices": choices, **more}
