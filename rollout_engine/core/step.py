"""One step: its work, and whose it is."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from rollout_engine.core.executor import Executor
from rollout_engine.core.request import Request, Sequence
from rollout_engine.messages import ModelRunnerOutput, ScheduledSequence, SchedulerOutput


class Step:
    """From its scheduling until its result is in.

    It holds sequences, not their ids: one that ends meanwhile leaves its id to others.
    """

    __slots__ = ("_wait", "drawn", "num_cached_tokens", "rows", "work")

    def __init__(self, work: SchedulerOutput) -> None:
        self.work = work
        self.rows: list[Sequence] = []
        """Of each of `work.scheduled`."""
        self.drawn: list[Sequence] = []
        """Of each of `work.samples`."""
        self.num_cached_tokens: dict[int, int] = {}
        """`EngineCoreOutputs.num_cached_tokens` of the requests that it introduces."""
        self._wait: Callable[[], ModelRunnerOutput] = partial(_refuse, "it was never submitted")

    @property
    def sequences(self) -> list[Sequence]:
        """All that it computes or draws for, each once."""
        return list({id(sequence): sequence for sequence in [*self.rows, *self.drawn]}.values())

    @property
    def forked(self) -> list[Request]:
        """Requests of which it draws for several samples from one row: their prompts end here."""
        computed = {id(sequence) for sequence in self.rows}
        requests = (sequence.request for sequence in self.drawn if id(sequence) not in computed)
        return list({id(request): request for request in requests}.values())

    def submit(self, executor: Executor) -> None:
        """Begin it."""
        self._wait = executor.submit(self.work)

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the executor raised, and `ValueError` for columns of a wrong length."""
        result = self._wait()
        for name in ("token_ids", "logprobs", "kept_logprob_mass"):
            column = getattr(result, name)
            if column is not None and len(column) != len(self.drawn):
                raise ValueError(f"the executor returned {len(column)} {name} for {len(self.drawn)} samples")
        return result

    def dump(self) -> str:
        """What was scheduled, one line a sequence, without any tokens."""
        work = self.work
        head = (
            f"policy_version {work.policy_version}, {work.num_tokens} tokens, {len(work.scheduled)} scheduled, "
            f"{len(work.samples)} samples, {len(work.new)} new, {len(work.block_copies)} block copies"
        )
        return "\n".join([head, *(_dump_row(row) for row in work.scheduled)])


def _refuse(why: str) -> NoReturn:
    raise RuntimeError(why)


def _dump_row(row: ScheduledSequence) -> str:
    start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_tokens
    return f"  sequence {row.sequence_id}: tokens [{start}, {end}), {row.first_block + len(row.block_ids)} blocks"
