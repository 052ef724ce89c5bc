"""Beam search over an engine's own requests: one token of each beam at a time, whose prefix the cache has.

    beams (at most W) ── a request each, for the likeliest tokens ──> candidates, the best first
    candidate behind an end id, or of `max_tokens`     finished, if it is among the first W
    the first W of the others                          the next beams

Equal candidates are in the order of their beams, then of their ids. A search ends when no beam can become
better than the W finished ones. Scores are sums of the engine's log-probs: those of the trainer, bit for bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rollout_engine.base.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from rollout_engine.base.errors import EngineGenerateError, RequestError, RetryableError
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.sampling_params import MAX_LOGPROBS, SamplingParams
from rollout_engine.faces.frontend import Frontend
from rollout_engine.text.input_processor import CheckedPrompt, at_index
from rollout_engine.text.prompts import with_lora


class _Beam(NamedTuple):
    """The generated tokens of one sequence."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    cumulative: float = 0.0
    versions: list[int] = []

    def extend(self, token_id: int, logprob: float, version: int) -> "_Beam":
        """The sequence with one more token."""
        longer = [*self.token_ids, token_id], [*self.logprobs, logprob]
        return _Beam(*longer, self.cumulative + logprob, [*self.versions, version])


class BeamSearches:
    """The searches of one call, a step at a time: `extend` takes the outputs of `prompts` until there are none."""

    def __init__(self, searches: list["_Search"], params: SamplingParams, limit: int | None) -> None:
        """`limit`: searches at once; None: all."""
        self._searches, self._limit = searches, limit
        self.sampling_params = params
        """Parameters of the request that scores the next tokens of a beam."""

    @classmethod
    def begin(
        cls,
        frontend: Frontend,
        prompts: Any,
        params: BeamSearchParams | dict[str, Any],
        lora: LoRALike | Sequence[LoRALike | None] | None,
        limit: int | None = None,
    ) -> Self:
        """Check prompts and params, and load adapters. Blocks. Raises `RequestError` naming the prompt's index."""
        params = _as_params(params)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise RequestError.for_field("concurrency_limit", limit, "an int of at least 1, or None")
        info, inputs = frontend.client.info, frontend.inputs
        end_ids = frozenset[int]() if params.ignore_eos else frozenset(inputs.eos_token_ids)
        width = params.beam_width + len(end_ids)
        if width > MAX_LOGPROBS:
            raise RequestError.for_field("beam_width", params.beam_width, f"at most {MAX_LOGPROBS - len(end_ids)}")
        sampling = SamplingParams(
            max_tokens=1,
            logprobs=min(width, info.vocab_size),
            temperature=params.temperature,
            ignore_eos=True,
            detokenize=False,
            speculation=False,
            output_kind="final_only",
        )
        frontend.ensure_loras(lora)
        searches = []
        for index, checked in enumerate(inputs.check_batch(with_lora(prompts, lora), sampling)):
            room = info.max_model_len - len(checked.token_ids)
            if params.max_tokens > room:
                error = RequestError.for_field("max_tokens", params.max_tokens, f"at most {room}, by max_model_len")
                raise at_index("prompts", index, error)
            searches.append(_Search(checked, params, end_ids))
        return cls(searches, sampling, limit)

    def __len__(self) -> int:
        return len(self._searches)

    @property
    def _running(self) -> list["_Search"]:
        return [search for search in self._searches if search.beams][: self._limit]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The beams whose next tokens are to be scored; empty once all searches have ended."""
        return [prompt for search in self._running for prompt in search.prompts]

    def extend(self, outputs: Sequence[RequestOutput]) -> list[int]:
        """Take the outputs of `prompts`. Returns the number of tokens that each search has found that has ended now.

        Raises `EngineGenerateError` for a beam that failed, and `RetryableError` for one that was aborted.
        """
        samples, running = iter(map(_sample_of, outputs)), self._running
        for search in running:
            search.extend([next(samples) for _ in search.beams])
        return [search.num_tokens for search in running if not search.beams]

    def outputs(self, frontend: Frontend) -> list[BeamSearchOutput]:
        """The results of all searches, in order."""
        return [search.output(frontend) for search in self._searches]


class _Search:
    """The search from one prompt."""

    def __init__(self, prompt: CheckedPrompt, params: BeamSearchParams, end_ids: frozenset[int]) -> None:
        self._prompt, self._params, self._end_ids = prompt, params, end_ids
        self.beams = [_Beam()]
        self._finished: list[_Beam] = []
        """The best so far, best first."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens of the finished sequences."""
        return sum(len(beam.token_ids) for beam in self._finished)

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """A prompt for each beam."""
        prompt = self._prompt
        shared: dict[str, Any] = {"cache_salt": prompt.cache_salt or None, "lora_request": prompt.lora or None}
        if prompt.pictures:
            shared["pictures"] = list(prompt.pictures)
        return [{"prompt_token_ids": prompt.token_ids + beam.token_ids, **shared} for beam in self.beams]

    def extend(self, samples: Sequence[CompletionOutput]) -> None:
        """Take the likeliest tokens behind each beam."""
        width, length = self._params.beam_width, len(self.beams[0].token_ids) + 1
        candidates = []
        for place, (beam, sample) in enumerate(zip(self.beams, samples, strict=True)):
            assert sample.top_logprobs is not None, "they were asked for"
            version = sample.version_spans[-1].policy_version
            for token_id, logprob in zip(*(column[0].tolist() for column in sample.top_logprobs), strict=True):
                if token_id >= 0 and logprob > -np.inf:
                    longer = beam.extend(token_id, logprob, version)
                    candidates.append((-longer.cumulative, place, token_id, longer))
        candidates.sort(key=lambda each: each[:3])
        self.beams = []
        for rank, (_, _, token_id, beam) in enumerate(candidates):
            if token_id in self._end_ids or length == self._params.max_tokens:
                self._finished += [beam] if rank < width else []
            elif len(self.beams) < width:
                self.beams.append(beam)
        self._finished.sort(key=self._score, reverse=True)
        del self._finished[width:]
        if len(self._finished) == width and self.beams and not self._can_improve():
            self.beams = []

    def _score(self, beam: _Beam) -> float:
        return float(beam.cumulative / len(beam.token_ids) ** self._params.length_penalty)

    def _can_improve(self) -> bool:
        """Whether the best beam may still become better than the worst of the finished ones."""
        penalty, best = self._params.length_penalty, self.beams[0]
        length = self._params.max_tokens if penalty > 0 else len(best.token_ids) + 1
        return bool(best.cumulative / length**penalty > self._score(self._finished[-1]))

    def output(self, frontend: Frontend) -> BeamSearchOutput:
        """The result."""
        return BeamSearchOutput([self._sequence(beam, frontend) for beam in self._finished])

    def _sequence(self, beam: _Beam, frontend: Frontend) -> BeamSearchSequence:
        last, tokens = beam.token_ids[-1], self._prompt.token_ids + beam.token_ids
        has_ended = last in self._end_ids
        shown = tokens if not has_ended or self._params.include_stop_str_in_output else tokens[:-1]
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=np.array(beam.logprobs, np.float32),
            cum_logprob=beam.cumulative,
            score=self._score(beam),
            finish_reason="stop" if has_ended else "length",
            stop_reason=last if has_ended else None,
            policy_versions=beam.versions,
            text=None if frontend.codec is None else frontend.codec.decode(shown),
        )


def _as_params(params: Any) -> BeamSearchParams:
    if isinstance(params, dict):
        return BeamSearchParams(**params)
    if not isinstance(params, BeamSearchParams):
        raise RequestError.for_field("params", params, "BeamSearchParams, or a dict of their fields")
    return params


def _sample_of(output: RequestOutput) -> CompletionOutput:
    [sample] = output.outputs
    if sample.finish_reason == "error":
        raise EngineGenerateError(f"beam_search: {sample.error}")
    if sample.finish_reason == "abort":
        cause = "a pause, sleep or update with mode='abort', or abort_request"
        raise RetryableError(f"beam_search: a beam was aborted by {cause}: call it again once the engine runs.")
    return sample
