"""A scheduled step and the sequences in it."""

from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from rollout_engine.base.messages import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from rollout_engine.core.executor import Executor
from rollout_engine.core.recorder import Recorder
from rollout_engine.core.request import Request, Sequence


class Step:
    """One step, from its scheduling until its result is applied.

    It holds sequences, not their ids: the id of one that ends meanwhile may be used again.
    """

    __slots__ = ("_recorders", "_wait", "draft_sources", "num_cached_tokens", "rows", "sampled", "work")

    def __init__(self, work: SchedulerOutput) -> None:
        self.work = work
        self.rows: list[Sequence] = []
        """The sequence of each row in `work.scheduled`."""
        self.sampled: list[Sequence] = []
        """The sequence of each task in `work.samples`."""
        self.num_cached_tokens: dict[int, int] = {}
        """`EngineCoreOutputs.num_cached_tokens` of the requests that are new in this step."""
        self.draft_sources: dict[int, str] = {}
        """The source of each sequence's draft, by its id; see `DraftStats`."""
        self._wait: Callable[[], ModelRunnerOutput] = _refuse
        self._recorders: Iterable[Recorder] = ()

    @property
    def has_drafts(self) -> bool:
        """Whether some sequence may gain several tokens: how many is known with the result."""
        return any(row.draft_token_ids for row in self.work.scheduled)

    def decode_rows(self, every: int = 1) -> Iterator[tuple[ScheduledSequence, Sequence]]:
        """Yield the rows behind which drafts may be computed: one token, the last of a sequence, which alone draws.

        `every` k: of one sequence in k.
        """
        for row, sequence in zip(self.work.scheduled, self.rows, strict=True):
            if sequence.sequence_id % every:
                continue
            is_last = row.num_scheduled_tokens == 1 and row.num_computed_tokens + 1 == len(sequence.token_ids)
            source = sequence.request.source
            if is_last and sequence.request.forked and source.params.speculation and source.pooling is None:
                yield row, sequence

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that is computed or sampled, once."""
        return list({id(sequence): sequence for sequence in [*self.rows, *self.sampled]}.values())

    def find_sequences(self, sequence_id: int) -> list[Sequence]:
        """The computed sequences of this id: one or none."""
        return [sequence for sequence in self.rows if sequence.sequence_id == sequence_id]

    @property
    def forked(self) -> list[Request]:
        """Requests of which several sequences are sampled from one row: their prompts end in this step."""
        computed = {id(sequence) for sequence in self.rows}
        requests = (sequence.request for sequence in self.sampled if id(sequence) not in computed)
        return list({id(request): request for request in requests}.values())

    def submit(self, executor: Executor, recorders: Iterable[Recorder] = ()) -> None:
        """Begin the step. `recorders` are notified of it now, and of its result."""
        self._recorders = recorders
        for recorder in recorders:
            recorder.record_schedule(self.work, self.rows, self.sampled)
        self._wait = executor.submit(self.work)

    def result(self) -> ModelRunnerOutput:
        """Wait for the result. Raises the error of the executor, and `ValueError` for columns of a wrong length."""
        try:
            result = self._checked_result()
        except BaseException as problem:
            for recorder in self._recorders:
                recorder.record_result(None, problem)
            raise
        for recorder in self._recorders:
            recorder.record_result(result, None)
        return result

    def _checked_result(self) -> ModelRunnerOutput:
        result = self._wait()
        num_rows = len(self.sampled) if result.num_drawn is None else sum(result.num_drawn)
        if result.num_drawn is not None and len(result.num_drawn) != len(self.sampled):
            raise ValueError(f"the executor returned {len(result.num_drawn)} num_drawn for {len(self.sampled)} samples")
        for name in ("token_ids", "logprobs", "kept_logprob_mass", "routed_experts", "entropies", "hidden_states"):
            column = getattr(result, name)
            if column is not None and len(column) != num_rows:
                raise ValueError(f"the executor returned {len(column)} {name} for {num_rows} samples")
        return result

    def dump(self) -> str:
        """Describe the work for the log: one line a sequence, no tokens."""
        work = self.work
        lines = [
            f"policy_version {work.policy_version}, {work.num_scheduled_tokens} tokens, "
            f"{len(work.scheduled)} scheduled, {len(work.samples)} samples, {len(work.new)} new, "
            f"{len(work.block_copies)} block copies"
        ]
        for row in work.scheduled:
            start, num_blocks = row.num_computed_tokens, row.first_block + len(row.block_ids)
            tokens = f"[{start}, {start + row.num_scheduled_tokens})"
            lines.append(f"  sequence {row.sequence_id}: tokens {tokens}, {num_blocks} blocks")
        return "\n".join(lines)


def _refuse() -> NoReturn:
    raise RuntimeError("it was never submitted")
