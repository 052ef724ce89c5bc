"""Runs one step of every kind before the first request, so that no kernel is compiled in a live step.

Which code of a kernel a step needs depends on its rows: a chunk or a decode, a shared prefix, truncation, edited
logits, processed log-probs, top tokens, prompt log-probs, copied blocks. The steps here ask for all of these, in
sequences of no request; they write KV to block 0, and states to slots 0 and 1, which nothing reads before they are
written again. A mixture of experts also replays a choice.
"""

import logging
import time
from collections.abc import Iterator
from itertools import count

import numpy as np

from rollout_engine.base.messages import NewSequence, SampleTask, ScheduledSequence, SchedulerOutput, StateMove
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.cuda.runner import CudaRunner
from rollout_engine.model.cuda.sequence_logprobs import sequence_logprobs

logger = logging.getLogger("rollout_engine")

_EVERYTHING = SamplingParams(presence_penalty=1.0, logprobs=2, logprobs_mode="processed")
"""A copy of the logits is edited; its top tokens and log-probs are asked for."""
_TRUNCATED = SamplingParams(presence_penalty=1.0, logprobs=2, logprobs_mode="processed", top_p=0.9)
_PROMPT = SamplingParams(prompt_logprobs=1)
_CHUNK_TOKENS = 3


def warm_up(runner: CudaRunner) -> None:
    """Run the steps. One that fails is a warning: requests that need its kernels compile them later, or fail.

    On a rank it raises: the others wait for the rest of the step.
    """
    started = time.perf_counter()
    try:
        for work in _steps(runner):
            runner.submit(work)()
        if (routing := runner.model.routing) is not None:
            own = np.full((_CHUNK_TOKENS - 1, *routing.shape), -1, np.int16)
            list(sequence_logprobs(runner.model, [[0] * _CHUNK_TOKENS], [1], 1.0, routed_experts=[own]))
    except Exception as problem:  # the compiler and the driver may raise anything
        if runner.num_ranks > 1:
            raise
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        logger.warning("Kernels could not all be compiled before the first request, which may wait or fail: %s", reason)
    finally:
        known = list(runner.block_tables())
        runner.submit(_work(finished=known))()
    logger.info("Steps of every kind were run in %.1f s.", time.perf_counter() - started)


def _steps(runner: CudaRunner) -> Iterator[SchedulerOutput]:
    limits, ids = runner.model.limits, count()
    if (tokens := min(_CHUNK_TOKENS, limits.num_tokens, limits.context - 1)) > 1:
        yield _step(runner, [next(ids)], _PROMPT, num_computed=0, num_scheduled=tokens)
    for params in (SamplingParams(), _EVERYTHING, _TRUNCATED):
        yield _step(runner, [next(ids)], params, num_computed=0, num_scheduled=1)
    unit = runner.shared_unit
    if unit is not None and limits.context > unit and min(limits.num_sequences, limits.num_tokens) > 1:
        yield _step(runner, [next(ids), next(ids)], SamplingParams(), num_computed=unit, num_scheduled=1)


def _step(
    runner: CudaRunner, ids: list[int], params: SamplingParams, *, num_computed: int, num_scheduled: int
) -> SchedulerOutput:
    """A step of new sequences, all of whose blocks are block 0."""
    context = num_computed + num_scheduled
    blocks = [0] * -(-context // runner.model.kv.block_size)
    work = _work(finished=list(runner.block_tables()))
    work.new = [NewSequence(each, [0] * context, context, params, seed=0) for each in ids]
    work.block_copies = [(0, 0)]
    has_states = not runner.model.kv.states.is_empty
    moves = [StateMove(-1, slot) if has_states else None for slot in range(len(ids))]
    scheduled = zip(ids, moves, strict=True)
    work.scheduled = [
        ScheduledSequence(each, num_computed, num_scheduled, blocks, state=move) for each, move in scheduled
    ]
    work.samples = [SampleTask(each, row) for row, each in enumerate(ids)]
    return work


def _work(finished: list[int]) -> SchedulerOutput:
    return SchedulerOutput(
        step=0, policy_version=0, finished_sequence_ids=finished, new=[], block_copies=[], scheduled=[], samples=[]
    )
