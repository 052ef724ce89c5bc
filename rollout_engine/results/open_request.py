"""One open request: a prompt and its n samples, and the choice of those to return."""

import time
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from rollout_engine.base.messages import EngineCoreRequest, Pooled, PromptLogprobs
from rollout_engine.base.outputs import PoolingOutput, Quantization, RequestMetrics, RequestOutput
from rollout_engine.base.seeds import child_seed
from rollout_engine.results.sample import Sample
from rollout_engine.text.detokenizer import Detokenizer
from rollout_engine.text.tokenizer import TextCodec

_NOT_POOLED = PoolingOutput()


class OpenRequest:
    """A prompt and its n samples while they grow."""

    __slots__ = (
        *("_kept", "_kind", "_num_kept", "_pooled", "_pools", "_prompt", "_prompt_token_ids", "changed", "metrics"),
        *("num_cached_tokens", "num_live", "num_prompt_tokens", "params", "prompt_hidden_states"),
        *("prompt_logprobs", "request_id", "samples"),
        *("_pictures", "seed", "sequence_ids", "trace_headers"),
    )

    def __init__(
        self,
        request_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        codec: TextCodec | None,
        trace_headers: Mapping[str, str] | None = None,
        num_kept: int | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        params = request.params
        self.trace_headers = trace_headers
        """W3C trace context of the caller."""
        self.request_id = request_id
        """Id that the user gave the request, or the engine made."""
        self.sequence_ids = range(request.first_sequence_id, request.first_sequence_id + params.n)
        """Ids of its sequences in the core, one per sample."""
        self.changed: set[int] = set()
        """Indexes of samples that changed since the last `render`."""
        self.seed = request.seed
        """Sequence seed of sample 0."""
        self.params = params
        self._num_kept = num_kept
        self._kept: frozenset[int] = frozenset()
        """Indexes of the samples to return, if not all are."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probs of the prompt that have not been returned yet, if asked for."""
        self.prompt_hidden_states: np.ndarray | None = None
        """Hidden states of the prompt, likewise."""
        self._pools, self._pooled = request.pooling is not None, _NOT_POOLED
        self._kind = params.output_kind
        self._prompt = prompt
        self._prompt_token_ids = (
            request.prompt_token_ids.copy()
        )  # for the user, who may change it; the core reads the other
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._pictures = request.pictures
        self.num_live = params.n
        """Number of samples that have not ended."""
        self.metrics = RequestMetrics(time.monotonic())
        self.samples = [
            Sample(
                *(index, child_seed(request.seed, index), params, _detokenizer(codec, request)),
                metrics=self.metrics,
                quantization=quantization,
                thinking=request.thinking,
            )
            for index in range(params.n)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.num_tokens for sample in self.samples)

    def pool(self, pooled: Pooled, policy_version: int) -> None:
        """Take the result of a pooling request."""
        self._pooled = PoolingOutput(pooled.data, policy_version, pooled.kv_min_version)

    def keep(self) -> Iterable[int]:
        """Keep the samples that ended in this step, if not all are kept.

        Returns the sequence ids of the others, once there are enough.
        """
        if self._num_kept is None:
            return ()
        ended = [i for i in sorted(self.changed - self._kept) if self.samples[i].finish_reason in ("stop", "length")]
        self._kept |= set(ended[: self._num_kept - len(self._kept)])
        if not self._has_enough:
            return ()
        return [self.sequence_ids[i] for i in range(len(self.samples)) if i not in self._kept]

    @property
    def _has_enough(self) -> bool:
        return len(self._kept) == self._num_kept

    def render(self) -> RequestOutput | None:
        """Return the news since the last call, if anything."""
        finished = self.num_live == 0
        if not self.changed or (self._kind == "final_only" and not finished):
            return None
        whole = finished and self._kind != "delta"
        indexes = range(len(self.samples)) if whole else sorted(self.changed)
        shown = [self.samples[i] for i in indexes if not self._has_enough or i in self._kept]
        self.changed.clear()
        prompt = self.prompt_logprobs
        states = self.prompt_hidden_states
        if self._kind == "delta":
            self.prompt_logprobs = self.prompt_hidden_states = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if prompt is None else prompt.logprobs,
            prompt_top_logprobs=None if prompt is None else prompt.top_logprobs,
            prompt_ranks=None if prompt is None else prompt.ranks,
            outputs=[sample.render(only_new=self._kind == "delta") for sample in shown],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=msgspec.structs.replace(self.metrics),
            num_dropped=len(self.samples) - len(self._kept) if self._has_enough else 0,
            pooled=self._ended_pooling() if self._pools else None,
            pictures=list(self._pictures),
            prompt_hidden_states=states,
        )

    def _ended_pooling(self) -> PoolingOutput:
        (end,) = self.samples
        data = self._pooled.data if end.finish_reason == "stop" else None
        return msgspec.structs.replace(self._pooled, data=data, finish_reason=end.finish_reason, error=end.error)


def _detokenizer(codec: TextCodec | None, request: EngineCoreRequest) -> Detokenizer | None:
    """Make the detokenizer of one sample; None if its text is not asked for."""
    params = request.params
    if codec is None or not params.detokenize:
        return None
    stream = codec.new_stream(
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        prompt_token_ids=request.prompt_token_ids,
    )
    return Detokenizer(stream, params, {*request.eos_token_ids, *(params.stop_token_ids or ())})
