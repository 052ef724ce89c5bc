"""The core of one simulated engine, of random sizes, and what must be so of it."""

from typing import NamedTuple

from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.calls import Call
from rollout_engine.engine.driver import EngineDriver
from rollout_engine.execution.executor import InlineExecutor
from tests.simulation.choices import Choices
from tests.simulation.faults import RandomFaults
from tests.simulation.guesses import Guesses
from tests.simulation.scheduler import Scheduler
from tests.simulation.spelling_worker import VOCAB_SIZE, SpellingWorker
from tests.simulation.users import check_promise


class Sizes(NamedTuple):
    """Sizes and options of an engine."""

    async_scheduling: bool
    block_size: int
    num_blocks: int
    step_seconds: float
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    admission: str
    num_spare_slots: int
    """Slots of states beyond those of running sequences; -1: the model keeps no states."""

    @classmethod
    def drawn(cls, choices: Choices) -> "Sizes":
        """Draw them."""
        return cls(
            async_scheduling=choices.chance(0.5),
            block_size=choices.pick([4, 2]),
            num_blocks=choices.pick([64, 20, 24]),
            step_seconds=choices.pick([0.0, 0.0, 0.002, 0.2]),
            max_num_seqs=choices.pick([8, 2, 4]),
            max_num_batched_tokens=choices.pick([64, 8, 16]),
            enable_prefix_caching=not choices.chance(0.2),
            admission=choices.pick(["queue", "queue", "queue", "reject"]),
            num_spare_slots=choices.pick([-1, -1, 1, 3, 24]),
        )


class SimulatedEngine:
    """The parts of one engine that are the same in any process: a core over a spelling worker."""

    def __init__(self, scheduler: Scheduler, faults: RandomFaults, sizes: Sizes) -> None:
        num_state_slots = 0 if sizes.num_spare_slots < 0 else sizes.max_num_seqs + sizes.num_spare_slots
        self.worker = SpellingWorker(
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            max_model_len=64,
            reach=faults.reach,
            sleep=scheduler.sleep,
            step_seconds=sizes.step_seconds,
            num_state_slots=num_state_slots,
        )
        self.executor = InlineExecutor(self.worker, async_scheduling=sizes.async_scheduling)
        config = CoreConfig(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_model_len=64,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=sizes.enable_prefix_caching,
            admission=sizes.admission,
            async_scheduling=sizes.async_scheduling,
            speculation=None if sizes.async_scheduling else SpeculationConfig(),
            step_seconds=((1, 1.0), (64, 1.1)),
            num_state_slots=num_state_slots,
            state_interval=2 * sizes.block_size,
        )
        self.core = EngineCore(self.executor, config)
        if config.speculation is not None:
            Guesses(self.core, config)
        self._failure: AssertionError | None = None

    def watch(self, driver: EngineDriver) -> None:
        """Check what every verb promises at the moment it is answered."""
        run = driver.run

        def run_watched(call: Call) -> None:
            call.future.add_done_callback(lambda _: self._check(call))
            run(call)

        driver.run = run_watched  # type: ignore[method-assign]

    def _check(self, call: Call) -> None:
        try:
            check_promise(self.core, call)
        except AssertionError as error:  # a future swallows what its callbacks raise
            self._failure = error

    def check_promises(self) -> None:
        """Raise what a verb promised and did not keep."""
        if self._failure is not None:
            raise self._failure

    def check_rest(self, driver: EngineDriver) -> None:
        """AssertionError unless an engine whose users have left it is as it was, but for its version."""
        core = self.core
        assert not core.num_unfinished_requests, f"{core.num_unfinished_requests} requests are left in the core"
        assert core.cache_usage() == 0.0, "KV blocks are left"
        assert core.metrics().state_usage == 0.0, "slots of states are left"
        assert str(core.lifecycle.state) == "RUNNING", f"the engine is left {core.lifecycle.describe()}"
        assert not driver._waiting, f"{len(driver._waiting)} calls still wait for a step"
        core.check_integrity()
        live = {name: int(tensor[0]) for name, tensor in self.worker.live.items()}
        assert set(live.values()) == {core.policy_version}, f"version {core.policy_version} is live, with {live}"
