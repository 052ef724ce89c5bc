"""One simulated run: a seed decides the engine's options, its users' operations, its failures and every switch."""

import hashlib
import logging
from collections import Counter
from contextlib import contextmanager
from typing import Any

from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.driver import Call, EngineDriver
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.faces.frontend import Frontend
from tests.faults.ledger import Ledger
from tests.simulation.choices import Choices
from tests.simulation.clock import SimulatedClock
from tests.simulation.faults import RandomFaults
from tests.simulation.scheduler import Carriers, Scheduler, SimulationFailed
from tests.simulation.seams import simulated, stand_ins
from tests.simulation.spelling_worker import VOCAB_SIZE, SpellingWorker
from tests.simulation.users import Users, check_promise

_CALM_ROUNDS = 60
"""Seconds of the simulated clock that users may take once nothing fails any more."""


class SimulatedEngine:
    """The parts of one engine that are the same in any process: a core of random sizes over a spelling worker."""

    def __init__(self, scheduler: Scheduler, faults: RandomFaults) -> None:
        choices = scheduler.choices
        ahead = choices.chance(0.5)
        self.worker = SpellingWorker(
            block_size=choices.pick([4, 2]),
            num_blocks=choices.pick([64, 20, 24]),
            max_model_len=64,
            reach=faults.reach,
            sleep=scheduler.sleep,
            step_seconds=choices.pick([0.0, 0.0, 0.002, 0.2]),
        )
        self.executor = InlineExecutor(self.worker, async_scheduling=ahead)
        config = CoreConfig(
            num_blocks=self.worker.info.num_blocks,
            block_size=self.worker.info.block_size,
            max_model_len=64,
            max_num_seqs=choices.pick([8, 2, 4]),
            max_num_batched_tokens=choices.pick([64, 8, 16]),
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=not choices.chance(0.2),
            admission=choices.pick(["queue", "queue", "queue", "reject"]),
            async_scheduling=ahead,
        )
        self.core = EngineCore(self.executor, config)
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
        assert str(core.lifecycle.state) == "RUNNING", f"the engine is left {core.lifecycle.describe()}"
        assert not driver._waiting, f"{len(driver._waiting)} calls still wait for a step"
        core.check_integrity()
        live = {name: int(tensor[0]) for name, tensor in self.worker.live.items()}
        assert set(live.values()) == {core.policy_version}, f"version {core.policy_version} is live, with {live}"


class Run:
    """One run, and what is known of it afterwards."""

    def __init__(self, seed: int, limit: int | None = None) -> None:
        self.seed, self.limit = seed, limit
        self.ledger = Ledger()
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._lines: list[tuple[float, str, str]] = []
        self.num_choices = 0

    def go(self, carriers: Carriers) -> "Run":
        """Carry it out. Raises nothing: `error` is what it found."""
        choices = Choices(self.seed, self.limit)
        scheduler = Scheduler(choices, SimulatedClock(), carriers, restlessness=choices.pick([0.2, 0.05, 0.5]))
        faults = RandomFaults(scheduler)
        replacements = stand_ins(scheduler, lambda: faults.reach("thread"))
        try:
            with simulated(scheduler, replacements), _silent():
                scheduler.run(lambda: _run_local(scheduler, faults, self))
        except Exception as error:
            self.error = error
        self._lines, self.num_choices, self.faults = scheduler.log, choices.num_made, faults.counts
        return self

    def lines(self) -> list[str]:
        """The log: seconds, task, what happened."""
        end = [] if self.error is None else [f"FAILED {type(self.error).__name__}: {self.error}"]
        return [f"{seconds:12.6f} {task:14} {what}" for seconds, task, what in self._lines] + end

    def shortest(self, carriers: Carriers) -> "Run":
        """The run of this seed with the fewest choices that fails by the same kind of error."""
        assert self.error is not None, "only a run that fails is made shorter"
        found, low, high = self, 0, self.num_choices
        while low < high:
            limit = (low + high) // 2
            shorter = Run(self.seed, limit).go(carriers)
            if type(shorter.error) is type(self.error):
                found, high = shorter, limit
            else:
                low = limit + 1
        return found

    def digest(self) -> str:
        """A digest of the log and of the number of choices: equal for equal runs."""
        text = "\n".join([*self.lines(), str(self.num_choices)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def _silent() -> Any:
    """The engine's log tells of every injected failure."""
    logger = logging.getLogger("rollout_engine")
    before, logger.disabled = logger.disabled, True
    others = [logging.getLogger(name) for name in ("rollout_engine.core.result_processor",)]
    states = [other.disabled for other in others]
    for other in others:
        other.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
        for other, state in zip(others, states, strict=True):
            other.disabled = state


def _run_local(scheduler: Scheduler, faults: RandomFaults, run: Run) -> None:
    """One engine in this process: the real front end, client, driver, core, executor and weight transaction."""
    choices = scheduler.choices
    faults.is_on = False
    engine = SimulatedEngine(scheduler, faults)
    client = LocalClient(engine.core, engine.executor, engine.worker.info, own_thread=choices.chance(0.5))
    engine.watch(client.driver)
    frontend = Frontend(client, None)
    try:
        _use(scheduler, faults, run, engine, frontend)
    finally:
        frontend.shutdown.detach()
    scheduler.wait(lambda: not scheduler.others("main"), scheduler.clock.now + 60.0, "the end of all threads")


def _use(scheduler: Scheduler, faults: RandomFaults, run: Run, engine: SimulatedEngine, frontend: Frontend) -> None:
    choices, client = scheduler.choices, frontend.client
    users = Users(scheduler, frontend, run.ledger, engine.worker, faults)
    run.outcomes = users.outcomes
    faults.is_on = True
    users.start(1 + choices.below(3), 2 + choices.below(6))
    if choices.chance(0.15):
        scheduler.sleep(choices.pick([0.0, 0.001, 0.01, 0.1]))
        scheduler.note("shutdown")
        frontend.shutdown()
    _wait_for_users(scheduler, faults, [users])
    run.ledger.assert_clean()
    users.check_calls()
    users.check_versions()
    if not engine.core.lifecycle.dead:
        users.calm()
        client.turn(lambda: False)
        engine.check_rest(client.driver)
    assert not len(frontend.streams), "streams are left in the client"
    frontend.shutdown()
    engine.check_promises()


def _wait_for_users(scheduler: Scheduler, faults: RandomFaults, all_users: list[Users]) -> None:
    """Return when all users are done; once they have been busy for long, nothing fails, and what is paused goes on."""
    for _ in range(_CALM_ROUNDS):
        if scheduler.wait(lambda: all(users.are_done for users in all_users), scheduler.clock.now + 1.0, "its users"):
            faults.is_on = False
            return
        faults.is_on = False
        all_users[0].calm()
    raise SimulationFailed("requests or calls never end")
