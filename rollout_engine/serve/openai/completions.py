"""POST /v1/completions: prompts of text or token ids, completed."""

from typing import Any

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.call import Call, GenerationFields, media_of, prompts_of
from rollout_engine.serve.openai.logprobs import text_logprobs
from rollout_engine.serve.openai.prompt_rows import prompt_rows
from rollout_engine.serve.openai.shapes import (
    matched_stop,
    of_versions,
    sampled_fields,
    sglang_metadata,
    total_usage,
)
from rollout_engine.serve.openai.text_offsets import TextOffsets
from rollout_engine.serve.route import Asked, Events, Reply
from rollout_engine.serve.sampling import Settings
from rollout_engine.serve.served import Served

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""


class CompletionBody(GenerationFields, kw_only=True):
    """Fields of a request."""

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of such."""
    multi_modal_data: dict[str, Any] | None = None
    """Pictures of a lone prompt, {"image": [URL, ...]}, one for each placeholder in it; as vLLM's prompts have them."""
    echo: bool | None = None
    """Put the prompt before the completion, in the text and in the log-probs."""
    logprobs: int | None = None
    """None: none; k: of each token, and of the k most likely ones."""
    add_special_tokens: bool | None = None


async def create(served: Served, asked: Asked) -> Reply | Events:
    """Complete prompts of text or token ids."""
    lora = await served.adapter_of(asked.body.model)
    return await (await asked.read_fields(_CompletionCall, served, asked, lora)).answer()


class _CompletionCall(Call):
    settings: Settings
    repeats = True

    def __init__(self, served: Served, asked: Asked, lora: str | None) -> None:
        super().__init__(served, asked, lora)
        body: CompletionBody = asked.body
        self._body, self._id = body, f"cmpl-{body.request_id or asked.request_id}"
        self._echoes = bool(body.echo)
        self._is_scoring = self._echoes and body.max_tokens == 0
        """Whether only the prompt is wanted: a token is sampled, and left out."""
        self.counts_samples = not self._is_scoring
        self.settings = self._read_settings()
        if not body.prompt:
            raise RequestError.for_field("prompt", body.prompt, "a text, token ids, or a list of such, not empty")
        self.prompts = prompts_of(body.prompt, body)
        if body.multi_modal_data is not None and len(self.prompts) > 1:
            bound = "absent from a call with several prompts"
            raise RequestError.for_field("multi_modal_data", "pictures", bound, "Send a call for each.")
        self.prompts[0] |= media_of(body)
        self._begun: set[tuple[int, int]] = set()
        """Index of a prompt and of a sample that were streamed."""
        self._rows: dict[int, msgspec.Raw | None] = {}
        """Index of a prompt -> its log-probs as JSON, once for all its choices."""
        self._offsets: dict[tuple[int, int], TextOffsets] = {}
        """Index of a prompt and of a sample -> the place at which its next token begins in its text."""

    async def write(self, results: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, result in enumerate(results):
            await self.prepare_output(index, result)
            choices += [self._choice(index, result, sample, is_first=True) for sample in result.outputs]
        version = max(choice["weight_version"] for choice in choices)
        made_by = {"weight_version": version, **sglang_metadata(self.served, version)}
        return self._response(choices, {"usage": total_usage(results, self.counts_samples), **made_by})

    async def prepare_output(self, index: int, output: RequestOutput) -> None:
        if self._body.prompt_logprobs is not None and index not in self._rows:
            self._rows[index] = await prompt_rows(self.served, output)

    def write_event(
        self, index: int, output: RequestOutput, samples: list[CompletionOutput], usage: dict[str, Any]
    ) -> dict[str, Any]:
        [sample] = samples
        key = index, sample.index
        choice = self._choice(index, output, sample, is_first=key not in self._begun)
        self._begun.add(key)
        return self._response([choice], usage)

    def write_last_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._response([], usage)

    def _response(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        return self.write_head(self._id, "text_completion", choices, more)

    def _read_settings(self) -> Settings:
        body = self._body
        most = 1 if self._is_scoring else _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        kind = "delta" if body.stream else "final_only"
        more: dict[str, Any] = {"output_kind": kind, "logprobs": body.logprobs, "max_tokens": most}
        if self._echoes and body.logprobs is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
        return self.served.settings.read(body, **more)

    def _choice(self, index: int, output: RequestOutput, sample: CompletionOutput, *, is_first: bool) -> dict[str, Any]:
        """One choice, or its new tokens."""
        body, served = self._body, self.served
        text, token_ids = (sample.text, sample.token_ids) if not self._is_scoring else ("", [])
        echoes = self._echoes and is_first
        prompt_text = self._prompt_text(output) if echoes else ""
        choice: dict[str, Any] = {
            "index": index * self.settings.params.n + sample.index,
            "text": prompt_text + text,
            "logprobs": None,
            "finish_reason": "length" if self._is_scoring and sample.finish_reason else sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "matched_stop": None if self._is_scoring else matched_stop(sample),
            "seed": sample.seed,
            **sampled_fields(sample, output),
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
            codec = self.served.engine.frontend.inputs.codec
            self._offsets[key] = TextOffsets(codec, self.settings.params, output.prompt_token_ids)
        offsets = self._offsets[key]
        before = [] if prompt_text is None else offsets.of_prompt(prompt_text, output.prompt_token_ids)
        return before + ([] if self._is_scoring else offsets.of_sample(sample.token_ids))

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.served.codec.decode(output.prompt_token_ids)
