"""How long a step takes by its number of rows, measured at load: whether drafted tokens pay depends on it."""

import logging
import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.messages import (
    ModelRunnerOutput,
    NewSequence,
    SampleTask,
    ScheduledSequence,
    SchedulerOutput,
    StateMove,
)
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.backend import Backend

logger = logging.getLogger("rollout_engine")

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TURNS = 4
_LONG_SECONDS = 0.5
"""No more rows are tried once a step takes this long."""

Costs = tuple[tuple[int, float], ...]
"""(rows, seconds), ascending."""


class SpeculationCosts(NamedTuple):
    """Measured costs of a model's steps, by which it is decided whether to draft tokens."""

    plain: Costs = ()
    """Costs of steps without drafted tokens; empty: no token is to be drafted."""
    with_drafts: Costs = ()
    """Costs of steps in which some rows are drafted tokens; empty: the same as `plain`."""


def step_costs(config: EngineConfig, backend: Backend) -> SpeculationCosts:
    """Measure the steps of a loaded model if tokens are to be drafted; else return empty costs.

    Raises `ConfigError` if several tokens in one step would round otherwise than one by one.
    """
    if config.speculates is None or not backend.generates:
        return SpeculationCosts()
    if not backend.is_deterministic:
        what = "this model's products are not row-independent, and drafted tokens would change its log-probs"
        if config.speculation != "auto":
            raise ConfigError(f"speculation={config.speculation!r} is not possible: {what}. Use speculation='off'.")
        logger.warning("speculation='auto' is off: %s.", what)
        return SpeculationCosts()
    max_rows = min(backend.num_blocks, config.max_num_batched_tokens)
    slots = backend.num_state_slots
    max_rows = min(max_rows, slots or max_rows)
    if not backend.runs_ahead:
        return SpeculationCosts(measure_steps(backend.runner.execute, max_rows, keeps_states=slots > 0))
    plain, drafted = (
        measure_steps(
            lambda work: backend.runner.submit(work)(),
            min(max_rows, most),
            num_drafted=num,
            keeps_states=slots > 0,
        )
        for num, most in ((0, config.max_num_seqs), (1, 2 * config.max_num_seqs))
    )
    return SpeculationCosts(plain, drafted) if plain and drafted else SpeculationCosts()


def measure_steps(
    execute: Callable[[SchedulerOutput], ModelRunnerOutput],
    max_rows: int,
    *,
    num_drafted: int = 0,
    keeps_states: bool = False,
) -> Costs:
    """Time steps of up to `max_rows` rows of sequences that decode, each in a KV block of its own, which is written.

    `num_drafted`: drafted tokens of each sequence, which are rows too. `keeps_states`: each has a slot of states, too.

    Of each size the least of four, taken in turns, and no less than a step of fewer rows. Nothing if fewer than two
    sizes fit.
    """
    per_sequence = 1 + num_drafted
    sizes = [num for num in _NUM_ROWS if per_sequence <= num <= max_rows]
    if len(sizes) < 2:
        return ()
    execute(_work(sizes[-1] // per_sequence, is_new=True, keeps_states=keeps_states))
    least: dict[int, float] = {}
    for _ in range(_TURNS):
        for num_rows in list(least or sizes):
            start = time.perf_counter()
            execute(_work(num_rows // per_sequence, is_new=False, num_drafted=num_drafted))
            seconds = time.perf_counter() - start
            least[num_rows] = min(seconds, least.get(num_rows, seconds))
            if seconds > _LONG_SECONDS and len(least) > 1:
                break
    execute(SchedulerOutput(0, 0, list(range(sizes[-1] // per_sequence)), [], [], [], []))
    return tuple(zip(least, accumulate(least.values(), max), strict=True))


def _work(num_sequences: int, *, is_new: bool, num_drafted: int = 0, keeps_states: bool = False) -> SchedulerOutput:
    params = SamplingParams(logprobs=0)
    names, draft = range(num_sequences), [0] * num_drafted
    return SchedulerOutput(
        step=0,
        policy_version=0,
        finished_sequence_ids=[],
        new=[NewSequence(name, [0], num_prompt_tokens=1, params=params, seed=name) for name in names] if is_new else [],
        block_copies=[],
        scheduled=[
            ScheduledSequence(
                name,
                0,
                1 + num_drafted,
                [name] if is_new else [],
                draft_token_ids=draft,
                state=StateMove(-1, name) if keeps_states else None,
            )
            for name in names
        ],
        samples=[SampleTask(name, name) for name in names],
    )
