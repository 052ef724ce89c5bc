"""Gathers the outputs of the core's steps into `RequestOutput`s: n samples a request, streamed or at the end."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollout_engine.base.hidden_states import as_float32
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, SequenceEnd
from rollout_engine.base.metrics import RequestStats
from rollout_engine.base.outputs import CompletionOutput, Quantization, RequestOutput
from rollout_engine.results.open_request import OpenRequest
from rollout_engine.results.request_timer import RequestTimer
from rollout_engine.results.sample import Sample
from rollout_engine.text.tokenizer import TextCodec

logger = logging.getLogger("rollout_engine")

_NUM_LOGGED = 8
"""Most samples named in one log line."""


class OutputProcessor:
    """Holds every open request. Each ends in exactly one `RequestOutput` with `finished=True`.

    While a request runs, its `output_kind` decides the content of results: "cumulative": changed samples, whole;
    "delta": their new part; "final_only": nothing. The finished output has all samples; with "delta" the new part of
    those that changed.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        stream_interval: int = 1,
        on_closed: Callable[[OpenRequest, BaseException | None], None] = lambda request, error: None,
        quantization: Quantization | None = None,
    ) -> None:
        """`on_closed` is called once per request: when its last sample has ended, or when it is discarded before.

        `quantization`: that of the engine.
        """
        self._codec = codec
        self._quantization = quantization
        self._stream_interval = stream_interval
        self._on_closed = on_closed
        self._requests: dict[str, OpenRequest] = {}
        """Open requests by request id."""
        self._owners: dict[int, OpenRequest] = {}
        """Request of each sequence id, of all open requests."""
        self._live: dict[int, Sample] = {}
        """Samples that have not ended, by sequence id."""
        self._timer = RequestTimer()

    @property
    def stats(self) -> RequestStats:
        """Timings of all requests so far."""
        return self._timer.stats

    @property
    def has_live(self) -> bool:
        """Whether some sample has not ended."""
        return bool(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        trace_headers: Mapping[str, str] | None = None,
        num_kept: int | None = None,
    ) -> OpenRequest:
        """Open a request; call it before the core gets it. `prompt` is its text, if it had one.

        `num_kept`: once that many have ended, the others are ended too and not returned. Ties within a step go to
        the lowest index; samples that failed or were aborted do not count. None: all are returned.
        """
        assert request_id not in self._requests, "the caller has checked the id"
        opened = OpenRequest(request_id, request, prompt, self._codec, trace_headers, num_kept, self._quantization)
        self._requests[request_id] = opened
        for sequence_id, sample in zip(opened.sequence_ids, opened.samples, strict=True):
            self._owners[sequence_id], self._live[sequence_id] = opened, sample
        return opened

    def sequence_ids_of(self, request_ids: Iterable[str]) -> list[int]:
        """Return the sequence ids of these open requests, in order. Unknown request ids have none."""
        found = (self._requests[request_id] for request_id in request_ids if request_id in self._requests)
        return [sequence_id for request in found for sequence_id in request.sequence_ids]

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Count the tokens of these open requests so far. Unknown ids have none."""
        return sum(self._requests[id].num_tokens for id in request_ids if id in self._requests)

    def parts(self, request_id: str, starts: Sequence[int], min_tokens: int) -> list[CompletionOutput]:
        """The tokens of an open request's samples behind the first `starts`, one number each, without text.

        [] unless one of them has at least `min_tokens` there.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        pairs = list(zip(request.samples, starts, strict=True))
        if all(sample.num_tokens - start < min_tokens for sample, start in pairs):
            return []
        return [sample.part(start) for sample, start in pairs if sample.num_tokens > start]

    def restore(self, request: OpenRequest, parts: Iterable[CompletionOutput]) -> dict[int, list[int]]:
        """Give the samples of a new request the parts that `parts` returned in an earlier process.

        Returns the tokens of those that have not ended, by their sequence ids.
        """
        for part in parts:
            sample = request.samples[part.index]
            sample.restore(part)
            if sample.finish_reason is not None:
                request.changed.add(part.index)
                self._end(request.sequence_ids[part.index], max(sample.policy_versions, default=0))
        pairs = zip(request.sequence_ids, request.samples, strict=True)
        return {sequence_id: sample.part(0).token_ids for sequence_id, sample in pairs if sequence_id in self._live}

    def owner_of(self, sequence_id: int) -> OpenRequest | None:
        """The open request that a sequence is a sample of."""
        return self._owners.get(sequence_id)

    def discard(self, request_id: str, error: BaseException | None = None) -> None:
        """Close a request without a result, for `error` if there is one. An unknown id is a no-op."""
        if request_id in self._requests:
            request = self._requests.pop(request_id)
            if request.num_live:
                self._on_closed(request, error)
                self._timer.forget_sequences(request.sequence_ids)
            for sequence_id in request.sequence_ids:
                del self._owners[sequence_id]
                self._live.pop(sequence_id, None)

    def update(self, outputs: EngineCoreOutputs) -> tuple[list[OpenRequest], list[int]]:
        """Add a step. Returns (requests with something to `take`, sequences that ended here and not in the core).

        Those were ended by their text, or because enough others of their request had ended; the caller aborts them.
        """
        for sequence_id, num_cached_tokens in outputs.num_cached_tokens.items():
            if sequence_id in self._owners:
                self._owners[sequence_id].num_cached_tokens = num_cached_tokens
                self._timer.record_start(self._owners[sequence_id].metrics, outputs.start_time)
        for sequence_id, logprobs in outputs.prompt_logprobs.items():
            if sequence_id in self._owners:
                self._owners[sequence_id].prompt_logprobs = logprobs
        for sequence_id, routed in outputs.prompt_routed_experts.items():
            if sequence_id in self._owners:
                for sample in self._owners[sequence_id].samples:
                    sample.begin_routed(routed)
        for sequence_id, states in outputs.prompt_hidden_states.items():
            if sequence_id in self._owners:
                self._owners[sequence_id].prompt_hidden_states = as_float32(states)
        for sequence_id, pooled in outputs.pooled.items():
            if sequence_id in self._owners:
                self._owners[sequence_id].pool(pooled, outputs.policy_version)
        self._timer.tokens(list(filter(self._live.__contains__, outputs.sequence_ids)), outputs.start_time)
        changed = self._append(outputs)
        stopped = [sequence_id for sequence_id in changed if self._live[sequence_id].read_text()]
        for sequence_id in stopped:
            self._end(sequence_id, outputs.policy_version)
        if self._stream_interval > 1:
            changed = [sequence_id for sequence_id in changed if self._is_due(sequence_id)]
        self._log_errors(outputs.ended)
        for end in outputs.ended:
            if end.sequence_id in self._live:  # neither discarded nor ended by its text before
                self._live[end.sequence_id].finish(end)
                self._end(end.sequence_id, outputs.policy_version)
                changed.append(end.sequence_id)
        requests = self._mark(changed)
        return requests, stopped + self._end_surplus(requests, outputs.policy_version)

    def take(self, request: OpenRequest) -> RequestOutput | None:
        """Return the news of a request since the last call, if anything; a finished request is closed."""
        result = request.render()
        if result is not None and result.finished:
            self.discard(result.request_id)
        return result

    def _is_due(self, sequence_id: int) -> bool:
        """Whether a sample that changed is to be output: it has ended, or has `stream_interval` new tokens."""
        sample = self._live.get(sequence_id)
        if sample is None or not sample.num_rendered:
            return True
        return sample.num_tokens - sample.num_rendered >= self._stream_interval

    def _append(self, outputs: EngineCoreOutputs) -> list[int]:
        """Append a step's columns to the samples. Returns the ids of the sequences whose samples are watched.

        The only code here that touches every token of every step.
        """
        live, watched, version = self._live, [], outputs.policy_version
        sequence_ids = outputs.sequence_ids
        nothing = [None] * len(sequence_ids)
        columns = (sequence_ids, outputs.token_ids, outputs.kv_min_versions, outputs.logprobs or nothing)
        for sequence_id, token_id, kv_min_version, logprob in zip(*columns, strict=True):
            sample = live.get(sequence_id)
            if sample is not None:  # else discarded, or ended by its text
                sample.append(token_id, logprob, version, kv_min_version)
                if sample.is_watched:
                    watched.append(sequence_id)
        if outputs.kept_logprob_mass is not None:
            for sequence_id, mass in zip(sequence_ids, outputs.kept_logprob_mass, strict=True):
                if sequence_id in live:
                    live[sequence_id].append_kept_mass(mass)
        if outputs.top_logprobs is not None:
            for sequence_id, ids, logprobs in zip(sequence_ids, *outputs.top_logprobs, strict=True):
                if sequence_id in live:
                    live[sequence_id].append_top(ids, logprobs)
        if outputs.sampled_ranks is not None:
            for sequence_id, rank in zip(sequence_ids, outputs.sampled_ranks.tolist(), strict=True):
                if sequence_id in live:
                    live[sequence_id].append_rank(rank)
        if outputs.routed_experts is not None:
            for sequence_id, row in zip(sequence_ids, outputs.routed_experts, strict=True):
                if sequence_id in live:
                    live[sequence_id].append_routed(row)
        if outputs.entropies is not None:
            for sequence_id, entropy in zip(sequence_ids, outputs.entropies.tolist(), strict=True):
                if sequence_id in live:
                    live[sequence_id].append_entropy(entropy)
        if outputs.hidden_states is not None:
            for sequence_id, row in zip(sequence_ids, outputs.hidden_states, strict=True):
                if sequence_id in live:
                    live[sequence_id].append_hidden_state(row)
        if outputs.id_logprobs is not None:
            for sequence_id, logprobs in outputs.id_logprobs.rows():
                if sequence_id in live:
                    live[sequence_id].append_id_logprobs(logprobs)
        if outputs.supports is not None:
            for sequence_id, ids in outputs.supports.rows():
                sample = live.get(sequence_id)
                if sample is not None and sample.append_support(ids) and not sample.is_watched:
                    watched.append(sequence_id)
        return watched

    def _end(self, sequence_id: int, live_version: int) -> None:
        request, sample = self._owners[sequence_id], self._live.pop(sequence_id)
        request.num_live -= 1
        self._timer.record_sequence_end(sequence_id, sample.finish_reason, sample.policy_versions, live_version)
        if request.num_live == 0:
            self._timer.record_request_end(
                request.metrics, request.num_prompt_tokens, request.num_tokens, request.params
            )
            self._on_closed(request, None)

    def _end_surplus(self, requests: Iterable[OpenRequest], live_version: int) -> list[int]:
        """End the samples that are not needed any more. Returns the sequence ids of those that had not ended."""
        surplus = [sequence_id for request in requests for sequence_id in request.keep()]
        if not surplus:
            return surplus
        live = list(filter(self._live.__contains__, surplus))
        for sequence_id in live:
            self._live[sequence_id].finish(SequenceEnd(sequence_id, "abort"))
            self._end(sequence_id, live_version)
        self.stats.dropped_samples += len(surplus)
        return live

    def _log_errors(self, ended: list[SequenceEnd]) -> None:
        """Log which requests failed, by their ids: the core's own log has only sequence ids."""
        failed: dict[str | None, list[int]] = {}
        for end in ended:
            if end.finish_reason == "error" and end.sequence_id in self._live:
                failed.setdefault(end.error, []).append(end.sequence_id)
        for error, sequence_ids in failed.items():
            more = f" and {len(sequence_ids) - _NUM_LOGGED} more" if len(sequence_ids) > _NUM_LOGGED else ""
            samples = ", ".join(map(self._describe, sequence_ids[:_NUM_LOGGED]))
            logger.warning("%s. This ended %s%s", (error or "").rstrip("."), samples, more)

    def _describe(self, sequence_id: int) -> str:
        """Describe a sample in its user's terms."""
        request = self._owners[sequence_id]
        return f"sample {sequence_id - request.sequence_ids.start} of {request.request_id!r} (sequence {sequence_id})"

    def _mark(self, sequence_ids: list[int]) -> list[OpenRequest]:
        """Mark these samples as changed. Returns their requests, each once."""
        requests: dict[OpenRequest, None] = {}
        for sequence_id in sequence_ids:
            request = self._owners[sequence_id]
            request.changed.add(sequence_id - request.sequence_ids.start)
            requests[request] = None
        return list(requests)
