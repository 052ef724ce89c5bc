"""POST /v1/completions: prompts of text or token ids, completed."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.generation import Generation, failed
from rollout_engine.serve.openai.logprobs import text_logprobs
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import (
    StreamOptions,
    matched_stop,
    now,
    of_versions,
    sglang_metadata,
    total_usage,
)
from rollout_engine.serve.openai.text_offsets import TextOffsets
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import SamplingFields, Settings
from rollout_engine.serve.served import Served

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""


class CompletionBody(SamplingFields, kw_only=True):
    """Fields of a request."""

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of such."""
    model: str | None = None
    echo: bool | None = None
    """Put the prompt before the completion, in the text and in the log-probs."""
    logprobs: int | None = None
    """None: none; k: of each token, and of the k most likely ones."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens as "token_id:7" where their texts would stand."""
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Complete prompts of text or token ids."""
    call = await asked.read_fields(_Call, served, asked, await served.adapter_of(asked.body.model))
    if asked.body.stream:
        return Events(call.events())
    return Reply(await call.reply())


class _Call:
    """One call: its settings, and how its outputs are written."""

    __slots__ = (
        *("_asked", "_body", "_created", "_echoes", "_id", "_is_scoring", "_lora", "_offsets", "_prompts"),
        *("_rows", "_served", "_settings"),
    )

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        body: CompletionBody = asked.body
        self._served, self._asked, self._body, self._lora = served, asked, body, lora
        self._id, self._created = f"cmpl-{body.request_id or asked.request_id}", now()
        self._is_scoring = bool(body.echo) and body.max_tokens == 0
        """Whether only the prompt is wanted: a token is sampled, and left out."""
        self._echoes = bool(body.echo)
        kind = "delta" if body.stream else "final_only"
        self._settings = self._with_defaults(kind)
        self._prompts = _prompts(body)
        self._rows: dict[int, msgspec.Raw | None] = {}
        """Index of a prompt -> its log-probs as JSON, once for all its choices."""
        self._offsets: dict[tuple[int, int], TextOffsets] = {}
        """Index of a prompt and of a sample -> where its next token begins in its text."""

    async def reply(self) -> dict[str, Any]:
        with Generation(self._served, self._asked, self._body.request_id) as generation:
            await self._start(generation)
            results = await generation.results()
        choices = []
        for index, result in enumerate(results):
            problem = failed(result)
            if problem is not None:
                raise problem
            await self._write_rows(index, result)
            choices += [self._choice(index, result, sample, 0, is_first=True) for sample in result.outputs]
        version = max(choice["weight_version"] for choice in choices)
        made_by = {"weight_version": version, **sglang_metadata(self._served, version)}
        return self._response(choices, {"usage": total_usage(results, not self._is_scoring), **made_by})

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        body, outputs = self._body, dict[int, RequestOutput]()
        counts: dict[tuple[int, int], int] = {}
        asks = body.stream_options or StreamOptions()
        with Generation(self._served, self._asked, body.request_id) as generation:
            await self._start(generation)
            while (found := await generation.next()) is not None:
                index, output = found
                problem = failed(output)
                if problem is not None:
                    raise problem
                await self._write_rows(index, output)
                for sample in output.outputs:
                    key = (index, sample.index)
                    start = counts.get(key, 0)
                    choice = self._choice(index, output, sample, start, is_first=key not in counts)
                    counts[key] = start + len(sample.token_ids)
                    outputs[index] = output
                    yield self._response([choice], asks.usage_so_far(partial(self._usage, outputs, counts)))
        if asks.include_usage:
            yield self._response([], {"usage": self._usage(outputs, counts)})

    def _usage(self, outputs: Mapping[int, RequestOutput], counts: Mapping[tuple[int, int], int]) -> Any:
        return total_usage([*outputs.values()], not self._is_scoring, sum(counts.values()))

    async def _start(self, generation: Generation) -> None:
        body = self._body
        options: dict[str, Any] = {"priority": body.priority, "session_id": body.session_id, "lora": self._lora}
        await generation.start(self._prompts, self._settings, repeats=True, **options)

    async def _write_rows(self, index: int, output: RequestOutput) -> None:
        if self._body.prompt_logprobs is not None and index not in self._rows:
            self._rows[index] = await prompt_rows(self._served, output)

    def _with_defaults(self, kind: str) -> Settings:
        body = self._body
        most = 1 if self._is_scoring else _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        more: dict[str, Any] = {"output_kind": kind, "logprobs": body.logprobs, "max_tokens": most}
        if self._echoes and body.logprobs is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
        return self._served.settings.read(body, **more)

    def _response(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._lora or self._served.model,
            "choices": choices,
            **more,
        }

    def _choice(
        self, index: int, output: RequestOutput, sample: CompletionOutput, start: int, *, is_first: bool
    ) -> dict[str, Any]:
        """One choice, or what is new of it. `start`: how many of its tokens were written before."""
        body, served = self._body, self._served
        text, token_ids = (sample.text, sample.token_ids) if not self._is_scoring else ("", [])
        echoes = self._echoes and is_first
        prompt_text = self._prompt_text(output) if echoes else ""
        text = prompt_text + text
        choice: dict[str, Any] = {
            "index": index * self._settings.params.n + sample.index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._is_scoring and sample.finish_reason else sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "matched_stop": None if self._is_scoring else matched_stop(sample),
            "seed": sample.seed,
            **of_versions(sample, served.weight_version),
        }
        if body.logprobs is not None:
            prompt = output if echoes else None
            counted = None if self._is_scoring else sample
            choice["logprobs"] = text_logprobs(
                served,
                prompt,
                counted,
                self._offsets_of(index, output, sample, prompt_text if echoes else None),
                num_top=body.logprobs,
                as_ids=served.names_token_ids(body.return_tokens_as_token_ids),
            )
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = self._rows[index]
        return choice

    def _offsets_of(
        self, index: int, output: RequestOutput, sample: CompletionOutput, prompt_text: str | None
    ) -> list[int]:
        """Places of the tokens of a choice, or of those that are new. `prompt_text`: its prompt's, if it has it."""
        key = index, sample.index
        if key not in self._offsets:
            codec = self._served.engine.frontend.inputs.codec
            self._offsets[key] = TextOffsets(codec, self._settings.params, output.prompt_token_ids)
        offsets = self._offsets[key]
        before = [] if prompt_text is None else offsets.of_prompt(prompt_text, output.prompt_token_ids)
        return before + ([] if self._is_scoring else offsets.of_sample(sample.token_ids))

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._served.codec.decode(output.prompt_token_ids)


def _prompts(body: CompletionBody) -> Sequence[Any]:
    """The prompts of a body, in our own form."""
    given = body.prompt
    if not given:
        raise RequestError.for_field("prompt", given, "a text, token ids, or a list of such, not empty")
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    common: dict[str, Any] = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    made = []
    for each in several:
        if isinstance(each, str):
            added = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
            made.append({"prompt": each, **common, **added})
        else:
            made.append({"prompt_token_ids": each, **common})
    return made
