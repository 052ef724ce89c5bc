"""The results of steps: applied to their sequences, and kept as outputs until a call returns them."""

import logging
from collections import deque
from collections.abc import Collection, Iterable
from itertools import accumulate, pairwise
from typing import cast

import numpy as np

from rollout_engine.base.messages import EngineCoreOutputs, ModelRunnerOutput, Pooled, SequenceEnd
from rollout_engine.base.outputs import FinishReason
from rollout_engine.base.sequence_error import SequenceError
from rollout_engine.base.sequence_rows import IdLogprobs, SupportIds
from rollout_engine.base.version_pin import describe_end
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.request_table import RequestTable
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.core.step import Step

logger = logging.getLogger(__name__)

BAD_STATES = "its pooled hidden states hold NaN or inf; the model's weights or inputs are broken."


class ResultProcessor:
    """Appends sampled tokens, ends sequences, and queues the outputs of each step."""

    def __init__(self, scheduler: Scheduler, requests: RequestTable) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.pending_outputs: deque[EngineCoreOutputs] = deque()
        """Outputs of finished steps that have not been returned yet."""
        self._ended: list[SequenceEnd] = []
        """Finished sequences to report with the last of those outputs."""

    @property
    def has_pending(self) -> bool:
        """Whether outputs or ends have not been returned yet."""
        return bool(self.pending_outputs or self._ended)

    def pop_outputs(self) -> EngineCoreOutputs:
        """The outputs of the oldest step, with all ends if it is the only one. They may be empty."""
        if self.pending_outputs:
            outputs = self.pending_outputs.popleft()
        else:
            outputs = EngineCoreOutputs(self._scheduler.tables.policy_version)
        if not self.pending_outputs:
            outputs.ended, self._ended = self._ended, []
        return outputs

    def append(self, outputs: EngineCoreOutputs) -> None:
        """Queue the outputs of a step, unless they are empty."""
        if outputs.sequence_ids or outputs.num_cached_tokens or outputs.prompt_logprobs or outputs.pooled:
            self.pending_outputs.append(outputs)

    def update_from_output(self, step: Step, result: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
        """Append the sampled tokens to their sequences, end finished sequences, and queue the outputs.

        They are `outputs`, and for the tokens behind right drafts as many more as the longest brought.
        """
        drawn = _Drawn(step, result)
        self._scheduler.update_from_output(step)
        queued = [outputs]
        if result.num_drawn is None:
            fill_columns(outputs, step.sampled, result)
        else:
            queued += [EngineCoreOutputs(outputs.policy_version) for _ in range(1, max(drawn.num_kept))]
            for place, each in enumerate(queued):
                fill_columns(each, drawn.sequences, result, drawn.rows_at(place))
        for index, logprobs in result.prompt_logprobs.items():
            request = step.rows[index].request
            if request.num_live:
                outputs.prompt_logprobs[request.source.first_sequence_id] = logprobs
        for index, routed in result.prompt_routed_experts.items():
            outputs.prompt_routed_experts[step.rows[index].request.source.first_sequence_id] = routed
        for index, states in result.prompt_hidden_states.items():
            outputs.prompt_hidden_states[step.rows[index].request.source.first_sequence_id] = states
        self._pool(step, result, outputs)
        self._scheduler.stats.pictures.num_encoded += result.num_encoded_pictures
        self._scheduler.stats.num_tokens_sampled += sum(len(each.sequence_ids) for each in queued)
        for sequence, message in drawn.failed:
            self._scheduler.tables.forget_outside(sequence)  # its KV may be broken
            self.end(sequence, "error", message)
        for sequence, finish in drawn.finished:
            self._ended.append(SequenceEnd(sequence.sequence_id, *finish))
            self._scheduler.tables.publish_tail(sequence)
            self._retire(sequence)
        for each in queued:
            self.append(each)

    def _pool(self, step: Step, result: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
        """Report the results of pooling requests that are complete, and end them."""
        for index, data in result.pooled.items():
            sequence = step.rows[index]
            if sequence.ended:
                continue
            if not np.isfinite(data).all():
                self._scheduler.tables.forget_outside(sequence)
                self.end(sequence, "error", BAD_STATES)
                continue
            assert sequence.kv_min_version is not None, "its prompt is computed"
            outputs.pooled[sequence.sequence_id] = Pooled(data, sequence.kv_min_version)
            self._ended.append(SequenceEnd(sequence.sequence_id, "stop"))
            self._retire(sequence)

    def fail(self, step: Step, error: BaseException, later: deque[Step]) -> None:
        """End the sequences of a step in which the executor raised, and roll back the steps in flight behind it.

        For a `SequenceError` its request alone ends; the others of the step are computed again.
        """
        stats = self._scheduler.stats
        stats.num_steps += 1
        stats.num_failed_steps += 1
        message = f"step {step.work.step} failed: {type(error).__name__}: {error}"
        logger.warning("%s\n%s", message, step.dump(), exc_info=error)
        if isinstance(error, SequenceError) and (found := step.find_sequences(error.sequence_id)):
            return self._fail_request(step, found[0], str(error), later)
        forked_since = {request for other in later for request in other.forked}
        for sequence in step.sequences:
            request = sequence.request
            if not sequence.ended and (not request.forked or request in forked_since):  # it computes the prompt for all
                self.end_request(request, "error", message)
            elif not sequence.ended:
                self.end(sequence, "error", message)
        while later:
            self._scheduler.rollback(later.pop())
        self._scheduler.requeue_finished(step.work)
        self._scheduler.tables.forget_contents()  # blocks may be known into which this step was to copy

    def _fail_request(self, step: Step, sequence: Sequence, message: str, later: deque[Step]) -> None:
        """End the request of one sequence of a step that computed nothing, and roll back that and later steps."""
        if not sequence.ended:
            self.end_request(sequence.request, "error", message)
        while later:
            self._scheduler.rollback(later.pop())
        self._scheduler.rollback(step)
        self._scheduler.tables.forget_contents()

    def begin(self, request: Request) -> None:
        """Schedule a request that is prepared. One that only prefetches has ended by that, without a token."""
        if request.source.params.kv_hint == "prefetch":
            self.end_request(request, "length")
        else:
            self._scheduler.add(request)

    def end_request(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End all sequences of a request, the leader last, so that no sibling has to take over."""
        for sequence in reversed(request.live_sequences):
            self.end(sequence, reason, error)

    def abort(self, requests: Iterable[Request], error: str | None = None) -> None:
        """End these requests now, with the tokens they have."""
        for request in requests:
            self.end_request(request, "abort", error)

    def end_out_of_range(self, requests: Iterable[Request], version: int) -> None:
        """End requests that ask for other versions than `version`, which becomes or is the live one."""
        for request in requests:
            self.end_request(request, "abort", describe_end(request.source.params, version))

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence that got no token in this step."""
        if reason == "error":
            self._scheduler.tables.unpublish(sequence)
        elif not sequence.num_pending_tokens and sequence.num_computed_tokens == len(sequence.token_ids) - 1:
            self._scheduler.tables.publish_tail(sequence)  # a stop string ended it, and a next turn may follow
        self._ended.append(SequenceEnd(sequence.sequence_id, reason, error=error))
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        if sequence.request.num_live == 0:
            self._requests.remove(sequence.request)


class _Drawn:
    """The drawn tokens of a step, appended to their sequences: up to the first that ends its sequence, or failed."""

    def __init__(self, step: Step, result: ModelRunnerOutput) -> None:
        self.sequences = step.sampled
        """The sequence of each row of the columns."""
        self.num_kept: list[int] = []
        """Tokens of each sample that its sequence gained; left empty if each drew one."""
        self.finished: list[tuple[Sequence, tuple[FinishReason, int | None]]] = []
        self.failed: list[tuple[Sequence, str]] = []
        if result.num_drawn is None:
            for row, message in result.errors.items():
                if not step.sampled[row].ended:
                    self.failed.append((step.sampled[row], message))
            for row, (sequence, token_id) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
                if not sequence.ended and row not in result.errors and (finish := sequence.append(token_id)):
                    self.finished.append((sequence, finish))
        else:
            self._append_several(step.sampled, result, result.num_drawn)

    def _append_several(self, sampled: list[Sequence], result: ModelRunnerOutput, num_drawn: list[int]) -> None:
        self._starts = [0, *accumulate(num_drawn)]
        self.sequences = [sequence for sequence, num in zip(sampled, num_drawn, strict=True) for _ in range(num)]
        for sequence, (start, end) in zip(sampled, pairwise(self._starts), strict=True):
            row = start if not sequence.ended else end
            while row < end:
                if row in result.errors:
                    self.failed.append((sequence, result.errors[row]))
                    break
                append = sequence.append if row == start else sequence.append_drafted
                finish = append(result.token_ids[row])
                row += 1
                if finish:
                    self.finished.append((sequence, finish))
                    break
            self.num_kept.append(0 if sequence.ended else row - start)

    def rows_at(self, place: int) -> list[int]:
        """Rows of the tokens that are their sample's first (0), second (1), ..."""
        return [start + place for start, num in zip(self._starts, self.num_kept, strict=False) if num > place]


def fill_columns(
    outputs: EngineCoreOutputs, sampled: list[Sequence], result: ModelRunnerOutput, rows: Collection[int] | None = None
) -> None:
    """Fill in the tokens of `sampled`, the sequences of the rows of `result`: of `rows` alone if they are given.

    Rows with an error are left out, and those of sequences that had ended before.
    """
    outputs.sequence_ids = [sequence.sequence_id for sequence in sampled]
    outputs.kv_min_versions = cast(list[int], [sequence.kv_min_version for sequence in sampled])  # None: it has ended
    outputs.token_ids = result.token_ids
    outputs.logprobs = result.logprobs
    outputs.kept_logprob_mass = result.kept_logprob_mass
    outputs.top_logprobs = result.top_logprobs
    outputs.sampled_ranks = result.sampled_ranks
    outputs.routed_experts = result.routed_experts
    outputs.entropies = result.entropies
    outputs.hidden_states = result.hidden_states
    if rows is None:
        left_out = {row for row, sequence in enumerate(sampled) if sequence.ended} | result.errors.keys()
        rows = [row for row in range(len(sampled)) if row not in left_out] if left_out else range(len(sampled))
    if len(rows) < len(sampled):
        outputs.keep_rows(list(rows))
    outputs.id_logprobs = IdLogprobs.of(_by_sequence(sampled, result.id_logprobs, rows))
    outputs.supports = SupportIds.of(_by_sequence(sampled, result.supports, rows))


def _by_sequence(
    sampled: list[Sequence], values: dict[int, np.ndarray], rows: Collection[int]
) -> dict[int, np.ndarray]:
    """The values of these rows by the ids of their sequences."""
    return {sampled[row].sequence_id: values[row] for row in rows if row in values} if values else {}
