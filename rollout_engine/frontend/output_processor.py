"""Gathers what the core's steps bring into `RequestOutput`s: n samples a request, streamed or at the end."""

import time
from collections.abc import Sequence
from copy import copy

from rollout_engine.frontend.detokenizer import Detokenizer
from rollout_engine.frontend.sample import Sample
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.messages import EngineCoreOutput, EngineCoreRequest
from rollout_engine.outputs import RequestMetrics, RequestOutput
from rollout_engine.seeds import child_seed


class OutputProcessor:
    """Knows every open request. Each ends in exactly one `RequestOutput` with `finished=True`.

    What comes out while a request runs depends on its `output_kind`: "cumulative" the samples that changed, whole;
    "delta" what is new of them; "final_only" nothing. The finished output holds all samples, with "delta" what is new
    of those that changed.
    """

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._requests: dict[str, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """Requests whose finished output is still to come."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: EngineCoreRequest, prompt: str | None) -> None:
        """Open a request that the core has taken. `prompt` is its text, if it had one."""
        self._requests[request.request_id] = OpenRequest(request, prompt, self._codec)

    def discard(self, request_id: str) -> None:
        """Close a request without a result. An unknown id is a no-op."""
        self._requests.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """(results, ids of the sequences that a stop string has ended and the core must abort)."""
        changed: dict[str, OpenRequest] = {}
        stopped: list[str] = []
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None or request.samples[output.index].finish_reason is not None:
                continue  # discarded, or the core's word on a sequence that a stop string had ended
            changed[output.request_id] = request
            if request.update(output):
                stopped.append(request.sequence_id(output.index))
        results = [result for request in changed.values() if (result := request.render()) is not None]
        for result in results:
            if result.finished:
                del self._requests[result.request_id]
        return results, stopped


class OpenRequest:
    """A prompt and its n samples while they grow."""

    def __init__(self, request: EngineCoreRequest, prompt: str | None, codec: TextCodec | None) -> None:
        params = request.params
        self._request = request
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids.copy()  # the user's; the core reads the other
        self._changed: set[int] = set()
        self._num_live = params.n
        self._num_cached_tokens = 0
        self._metrics = RequestMetrics(time.monotonic())
        self.samples = [
            Sample(
                index,
                child_seed(request.seed, index),
                params,
                Detokenizer(codec.new_stream(skip_special_tokens=params.skip_special_tokens), params)
                if codec is not None and params.detokenize
                else None,
            )
            for index in range(params.n)
        ]

    def sequence_id(self, index: int) -> str:
        """What the core calls sample `index`."""
        request_id = self._request.request_id
        return request_id if len(self.samples) == 1 else f"{index}_{request_id}"

    def update(self, output: EngineCoreOutput) -> bool:
        """Take what one step brought to one live sample. True: a stop string ended it."""
        sample = self.samples[output.index]
        stopped = sample.update(output)
        self._changed.add(output.index)
        self._num_live -= sample.finish_reason is not None
        self._num_cached_tokens = output.num_cached_tokens
        now = time.monotonic()
        if output.new_token_ids and self._metrics.first_token_time is None:
            self._metrics.first_token_time = now
        if self._num_live == 0:
            self._metrics.finished_time = now
        return stopped

    def render(self) -> RequestOutput | None:
        """What there is to tell since the last call, if anything."""
        kind, finished = self._request.params.output_kind, self._num_live == 0
        if kind == "final_only" and not finished:
            return None
        whole = finished and kind != "delta"
        shown = self.samples if whole else [self.samples[index] for index in sorted(self._changed)]
        self._changed.clear()
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None,
            outputs=[sample.render(only_new=kind == "delta") for sample in shown],
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=copy(self._metrics),
        )
