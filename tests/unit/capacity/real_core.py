"""The real core on a simulated clock: what the simulated engine is held against."""

from functools import partial

from rollout_engine import SamplingParams
from rollout_engine.base.messages import EngineCoreRequest, ModelRunnerOutput
from rollout_engine.capacity.costs import StepShape
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore

END, OTHER = 1, 2


def shape_of(work):
    """What a scheduled step computes."""
    decoding = [row for row in work.scheduled if row.num_scheduled_tokens == 1]
    num_tokens = sum(row.num_scheduled_tokens for row in work.scheduled)
    context = sum(row.num_computed_tokens + row.num_scheduled_tokens for row in work.scheduled)
    return StepShape(len(decoding), num_tokens - len(decoding), context)


class ClockedExecutor:
    """Ends each sequence at its length, and lets the clock go on by what a step costs."""

    def __init__(self, costs, lengths):
        self.now, self.shapes = 0.0, []
        self._costs, self._lengths, self._num_sampled = costs, lengths, {}

    def submit(self, work):
        return partial(self._execute, work)

    def _execute(self, work):
        if work.scheduled:
            self.shapes.append(shape_of(work))
            self.now += self._costs.seconds(self.shapes[-1])
        return ModelRunnerOutput([self._next(task.sequence_id) for task in work.samples], None)

    def _next(self, sequence_id):
        self._num_sampled[sequence_id] = self._num_sampled.get(sequence_id, 0) + 1
        return END if self._num_sampled[sequence_id] >= self._lengths[sequence_id] else OTHER


def serve(file, workload, arrivals):
    """Serve jobs, which come at (time, numbers), on one real core. Returns when each has ended, and the executor."""
    lengths = {
        number * workload.num_samples + i: length
        for number, job in enumerate(workload.jobs)
        for i, length in enumerate(job.lengths)
    }
    executor = ClockedExecutor(file.costs.costs, lengths)
    sizes = {name: getattr(file.engine, name) for name in file.engine.__struct_fields__ if name != "num_kv_blocks"}
    longest = file.workload.prompt_tokens.most + file.workload.output_tokens.most
    core = EngineCore(
        executor, CoreConfig(num_blocks=file.engine.num_kv_blocks, max_model_len=longest, vocab_size=1 << 20, **sizes)
    )
    left = {number: len(job.lengths) for number, job in enumerate(workload.jobs)}
    ended, coming = {}, list(arrivals)
    while len(ended) < len(left):
        if not core.can_progress():
            executor.now = max(executor.now, coming[0][0])
        while coming and coming[0][0] <= executor.now:
            for number in coming.pop(0)[1]:
                core.add_request(_request(workload, number))
        for end in core.step().ended:
            number = end.sequence_id // workload.num_samples
            left[number] -= 1
            if not left[number]:
                ended[number] = executor.now
    core.check_integrity()
    return ended, executor, core.stats


def _request(workload, number):
    made = workload.request(number)
    return EngineCoreRequest(
        prompt_token_ids=list(made.prompt_token_ids),
        params=SamplingParams(n=workload.num_samples),
        max_tokens=made.max_tokens,
        seed=number,
        first_sequence_id=made.first_sequence_id,
        eos_token_ids=[END],
    )
