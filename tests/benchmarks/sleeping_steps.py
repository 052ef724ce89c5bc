"""A worker extension whose steps compute nothing: each takes the time that its costs say, and is written down."""

import time
from bisect import bisect_left

from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from worker_ext.base import WorkerExtension, rpc

END, OTHER = 2, 3
"""Token ids: the checkpoint's end, and one that ends nothing."""


class SleepingSteps(WorkerExtension):
    """Takes the runner's place. A step sleeps for what a measured step of about its shape has cost."""

    def __init__(self, worker: object) -> None:
        super().__init__(worker)
        worker.runner.execute = self._execute
        self._costs = [0.0, 0.0, 0.0, 0.0]
        self._ratios: list[tuple[int, float]] = [(0, 1.0)]
        self._lengths: dict[int, int] = {}
        self._running: dict[int, int] = {}
        """Sequence id -> tokens that are still to come."""
        self._steps: list[tuple[int, int, int, float, bool]] = []

    @rpc
    def begin_sleeping(self, costs: list[float], ratios: list[list[float]], lengths: dict[str, int]) -> None:
        """Sleep by these costs from now on, and forget the steps so far.

        `ratios`: (context tokens, measured / by the costs), ascending: where the measured steps were not as linear as
        the costs. `lengths`: seed of a sequence -> tokens that it samples.
        """
        self._costs, self._ratios = costs, [(int(context), ratio) for context, ratio in ratios]
        self._lengths = {int(seed): length for seed, length in lengths.items()}
        self._steps = []

    @rpc
    def slept_steps(self) -> list[list[float]]:
        """(rows, prefill tokens, context tokens, seconds until the next step began) of steps that another followed."""
        pairs = zip(self._steps, self._steps[1:], strict=False)
        return [[*map(float, step[:3]), following[3] - step[3]] for step, following in pairs if step[4]]

    def _execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        start = time.perf_counter()
        decoding = sum(row.num_scheduled_tokens == 1 for row in work.scheduled)
        prefill = work.num_scheduled_tokens - decoding
        context = sum(row.num_computed_tokens + row.num_scheduled_tokens for row in work.scheduled)
        for sequence_id in work.finished_sequence_ids:
            self._running.pop(sequence_id, None)
        for new in work.new:
            self._running[new.sequence_id] = self._lengths[new.seed] - (len(new.token_ids) - new.num_prompt_tokens)
        tokens = [self._next(task.sequence_id) for task in work.samples]
        if work.scheduled:
            self._steps.append((decoding, prefill, context, start, bool(self._running)))
            step, row, prefill_token, context_token = self._costs
            seconds = step + row * decoding + prefill_token * prefill + context_token * context
            index = min(bisect_left(self._ratios, (context, 0.0)), len(self._ratios) - 1)
            time.sleep(max(start + self._ratios[index][1] * seconds - time.perf_counter(), 0.0))
        return ModelRunnerOutput(tokens, None)

    def _next(self, sequence_id: int) -> int:
        self._running[sequence_id] -= 1
        if self._running[sequence_id] > 0:
            return OTHER
        del self._running[sequence_id]
        return END
