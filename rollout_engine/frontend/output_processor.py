"""Gathers what the core's steps bring into `RequestOutput`s: n samples a request, streamed or at the end."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy

from rollout_engine.frontend.detokenizer import Detokenizer
from rollout_engine.frontend.request_timer import RequestTimer
from rollout_engine.frontend.sample import Sample
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, PromptLogprobs, SequenceEnd
from rollout_engine.metrics import RequestStats
from rollout_engine.outputs import RequestMetrics, RequestOutput
from rollout_engine.seeds import child_seed

logger = logging.getLogger("rollout_engine")

_NUM_LOGGED = 8
"""Samples named in one line of the log."""


class OutputProcessor:
    """Knows every open request. Each ends in exactly one `RequestOutput` with `finished=True`.

    What comes out while a request runs depends on its `output_kind`: "cumulative" the samples that changed, whole;
    "delta" what is new of them; "final_only" nothing. The finished output holds all samples, with "delta" what is new
    of those that changed.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        stream_interval: int = 1,
        on_closed: "Callable[[OpenRequest, BaseException | None], None]" = lambda request, error: None,
    ) -> None:
        """`on_closed` is told once of every request: when its last sample has ended, or when it is discarded before."""
        self._codec = codec
        self._stream_interval = stream_interval
        self._on_closed = on_closed
        self._requests: dict[str, OpenRequest] = {}
        """By what the user calls them."""
        self._owners: dict[int, OpenRequest] = {}
        """Every sequence of every open request."""
        self._live: dict[int, Sample] = {}
        """The sequences that still gain tokens."""
        self._timer = RequestTimer()

    @property
    def stats(self) -> RequestStats:
        """Timings of all requests so far."""
        return self._timer.stats

    @property
    def num_open(self) -> int:
        """Requests whose finished output is still to come."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> "OpenRequest":
        """Open a request, before the core hears of it. `prompt` is its text, if it had one."""
        assert request_id not in self._requests, "whoever adds it has checked the id"
        opened = OpenRequest(request_id, request, prompt, self._codec, trace_headers)
        self._requests[request_id] = opened
        for sequence, sample in zip(opened.sequences, opened.samples, strict=True):
            self._owners[sequence], self._live[sequence] = opened, sample
        return opened

    def sequences_of(self, request_ids: Iterable[str]) -> list[int]:
        """Sequence ids of these open requests, in order. Unknown request ids have none."""
        found = (self._requests[request_id] for request_id in request_ids if request_id in self._requests)
        return [sequence for request in found for sequence in request.sequences]

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Tokens that these open requests have so far. Unknown ids have none."""
        return sum(self._requests[id].num_tokens for id in request_ids if id in self._requests)

    def discard(self, request_id: str, error: BaseException | None = None) -> None:
        """Close a request without a result, for `error` if there is one. An unknown id is a no-op."""
        if request_id in self._requests:
            request = self._requests.pop(request_id)
            if request.num_live:
                self._on_closed(request, error)
            sequences = request.sequences
            self._timer.discarded(sequences)
            for sequence in sequences:
                del self._owners[sequence]
                self._live.pop(sequence, None)

    def process(self, outputs: EngineCoreOutputs) -> tuple[list[RequestOutput], list[int]]:
        """(results, the sequences that a stop string or pattern has ended and the core must abort)."""
        changed, stopped = self.update(outputs)
        return [result for request in changed if (result := self.take(request)) is not None], stopped

    def update(self, outputs: EngineCoreOutputs) -> tuple[list["OpenRequest"], list[int]]:
        """(requests with something to `take`, the sequences that a stop string has ended and the core must abort)."""
        for sequence, count in outputs.num_cached_tokens.items():
            if sequence in self._owners:
                self._owners[sequence].num_cached_tokens = count
                self._timer.scheduled(self._owners[sequence].metrics, outputs.start_time)
        for sequence, logprobs in outputs.prompt_logprobs.items():
            if sequence in self._owners:
                self._owners[sequence].prompt_logprobs = logprobs
        self._timer.tokens(outputs.sequences, outputs.start_time)
        changed = self._append(outputs)
        stopped = [sequence for sequence in changed if self._live[sequence].read_text()]
        for sequence in stopped:
            self._end(sequence, outputs.policy_version)
        if self._stream_interval > 1:
            changed = [sequence for sequence in changed if self._is_due(sequence)]
        self._log_errors(outputs.ended)
        for end in outputs.ended:
            if end.sequence in self._live:  # not discarded, nor ended by a stop string before
                self._live[end.sequence].finish(end)
                self._end(end.sequence, outputs.policy_version)
                changed.append(end.sequence)
            else:
                self._timer.discarded([end.sequence])
        return self._mark(changed), stopped

    def take(self, request: "OpenRequest") -> RequestOutput | None:
        """What there is to tell of a request since the last call, if anything; when it is complete it is closed."""
        result = request.render()
        if result is not None and result.finished:
            self.discard(result.request_id)
        return result

    def _is_due(self, sequence: int) -> bool:
        """Whether a sample that changed has an output to give: it has ended, or has enough new tokens."""
        sample = self._live.get(sequence)
        if sample is None or not sample.num_rendered:
            return True
        return sample.num_tokens - sample.num_rendered >= self._stream_interval

    def _append(self, outputs: EngineCoreOutputs) -> list[int]:
        """Every column to its samples; returns the sequences that somebody watches while they grow.

        The one place that touches every token of every step.
        """
        live, watched, version = self._live, [], outputs.policy_version
        nothing = [None] * len(outputs.sequences)
        columns = (outputs.sequences, outputs.token_ids, outputs.kv_min_versions, outputs.logprobs or nothing)
        for sequence, token_id, kv_min_version, logprob in zip(*columns, strict=True):
            sample = live.get(sequence)
            if sample is not None:  # else discarded, or ended by a stop string
                sample.append(token_id, logprob, version, kv_min_version)
                if sample.is_watched:
                    watched.append(sequence)
        if outputs.kept_logprob_mass is not None:
            for sequence, mass in zip(outputs.sequences, outputs.kept_logprob_mass, strict=True):
                if sequence in live:
                    live[sequence].append_kept_mass(mass)
        if outputs.top_logprobs is not None:
            for sequence, ids, values in zip(outputs.sequences, *outputs.top_logprobs, strict=True):
                if sequence in live:
                    live[sequence].append_top(ids, values)
        if outputs.sampled_ranks is not None:
            for sequence, rank in zip(outputs.sequences, outputs.sampled_ranks.tolist(), strict=True):
                if sequence in live:
                    live[sequence].append_rank(rank)
        if outputs.id_logprobs is not None:
            for sequence, values in outputs.id_logprobs.rows():
                if sequence in live:
                    live[sequence].append_of_ids(values)
        return watched

    def _end(self, sequence: int, live_version: int) -> None:
        request, sample = self._owners[sequence], self._live.pop(sequence)
        request.num_live -= 1
        self._timer.ended(sequence, sample.finish_reason, sample.policy_versions, live_version)
        if request.num_live == 0:
            self._timer.finished(request.metrics, request.num_prompt_tokens, request.num_tokens)
            self._on_closed(request, None)

    def _log_errors(self, ended: list[SequenceEnd]) -> None:
        """Say which of the user's requests failed: the core's own log knows them as numbers."""
        failed: dict[str | None, list[str]] = {}
        for end in ended:
            if end.finish_reason == "error" and end.sequence in self._live:
                request = self._owners[end.sequence]
                sample = f"sample {end.sequence - request.sequences.start} of {request.request_id!r}"
                failed.setdefault(end.error, []).append(f"{sample} (sequence {end.sequence})")
        for error, samples in failed.items():
            more = f" and {len(samples) - _NUM_LOGGED} more" if len(samples) > _NUM_LOGGED else ""
            logger.warning("%s; this ended %s%s", error, ", ".join(samples[:_NUM_LOGGED]), more)

    def _mark(self, changed: list[int]) -> list["OpenRequest"]:
        """The requests of these sequences, each once."""
        requests: dict[OpenRequest, None] = {}
        for sequence in changed:
            request = self._owners[sequence]
            request.changed.add(sequence - request.sequences.start)
            requests[request] = None
        return list(requests)


class OpenRequest:
    """A prompt and its n samples while they grow."""

    def __init__(
        self,
        request_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        codec: TextCodec | None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        params = request.params
        self.trace_headers = trace_headers
        """The caller's trace."""
        self.request_id = request_id
        """The user's."""
        self.sequences = range(request.first_sequence, request.first_sequence + params.n)
        """The core's."""
        self.changed: set[int] = set()
        """Samples with something new since the last `render`."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        """What there is to tell of the prompt."""
        self._kind = params.output_kind
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids.copy()  # the user's; the core reads the other
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_live = params.n
        """Samples that still gain tokens."""
        self.metrics = RequestMetrics(time.monotonic())
        self.samples = [
            Sample(
                index,
                child_seed(request.seed, index),
                params,
                _detokenizer(codec, request),
                self.metrics,
            )
            for index in range(params.n)
        ]

    @property
    def num_tokens(self) -> int:
        """Sampled so far, of all samples."""
        return sum(sample.num_tokens for sample in self.samples)

    def render(self) -> RequestOutput | None:
        """What there is to tell since the last call, if anything."""
        finished = self.num_live == 0
        if not self.changed or (self._kind == "final_only" and not finished):
            return None
        whole = finished and self._kind != "delta"
        shown = self.samples if whole else [self.samples[index] for index in sorted(self.changed)]
        self.changed.clear()
        prompt = self.prompt_logprobs
        if self._kind == "delta":
            self.prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if prompt is None else prompt.logprobs,
            prompt_top_logprobs=None if prompt is None else prompt.top_logprobs,
            outputs=[sample.render(only_new=self._kind == "delta") for sample in shown],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=copy(self.metrics),
        )


def _detokenizer(codec: TextCodec | None, request: EngineCoreRequest) -> Detokenizer | None:
    """For one sample of `request`; None where its text is not asked for."""
    params = request.params
    if codec is None or not params.detokenize:
        return None
    stream = codec.new_stream(
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        prompt_token_ids=request.prompt_token_ids,
    )
    return Detokenizer(stream, params, {*request.eos_token_ids, *(params.stop_token_ids or ())})
