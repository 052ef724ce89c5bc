"""The fleet's real client, brain, ledger and balancer over `BrainCore`s; starts and updates are events, not threads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import EngineDeadError, TransferTimeoutError, WeightUpdateError
from rollout_engine.fleet.plan.balancer import STRATEGIES, Balancer
from rollout_engine.fleet.run import client as fleet_client
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.member import Member
from rollout_engine.fleet.run.publication import Published
from rollout_engine.fleet.run.update_round import check_same, drop
from rollout_engine.fleet.run.updates import FleetUpdates
from tests.simulation.brain_core import CALL_SECONDS, BrainCore, Weights
from tests.simulation.brain_world import World

_LOOK_SECONDS = 0.1
_CONFIG = EngineConfig(model="formula", skip_tokenizer_init=True)


class EventSupervisor:
    """Stands for `fleet.supervisor.Supervisor`: what that does on threads happens as events."""

    def __init__(self, world: World, config: EngineConfig, updates: FleetUpdates) -> None:
        """`world` takes the place of the provider: `FleetClient` hands it on."""
        self._world, self._updates = world, updates
        self._numbers = count()
        self.is_closed = False

    def make(self, index: int) -> Member:
        """A replica that has started."""
        return make_member(self._world, index, f"{index}.{next(self._numbers)}")

    def check(self, num_more: int, num_present: int) -> None:
        """Find room for every replica."""

    def start(self, index: int, at: float, fleet: FleetClient) -> None:
        """Start a replica at a time; it may take longer than a minute, and fail."""
        seconds = self._world.choices.pick((0.01, 0.3, 2.0, 70.0))
        self._world.later(self._wait(at) + seconds, self._start, index, fleet)

    def catch_up(self, member: Member, at: float, fleet: FleetClient) -> None:
        """Give a replica the newest weights at a time."""
        self._world.later(self._wait(at), _CatchUp(self._world, self._updates, member, fleet).begin)

    def retire(self, member: Member, *, answers_first: bool = False) -> None:
        """End a replica's engine, which answers nothing more: its callers have to live with that, whatever is asked."""
        member.replica.end()

    def close(self) -> None:
        """Begin nothing any more."""
        self.is_closed = True

    def end(self, members: Iterable[Member]) -> None:
        """End these replicas."""
        for member in members:
            member.replica.end()

    def _wait(self, at: float) -> float:
        return max(at - self._world.monotonic(), 0.0)

    def _start(self, index: int, fleet: FleetClient) -> None:
        if self.is_closed:
            return
        if self._world.strikes("start"):
            fleet.not_started(index, EngineDeadError("it did not start"))
            return
        member = self.make(index)
        self._world.note(f"{core_of(member).name} has started")
        if not fleet.add_replica(member, lambda: True):
            member.replica.end()


def core_of(member: Member) -> BrainCore:
    """The core of a replica."""
    core: Any = member.client
    return core  # type: ignore[no-any-return]


def make_member(world: World, index: int, name: str) -> Member:
    """A replica with a new core."""
    core: Any = BrainCore(world, index, name)
    return Member(index, core, "0")


class _CatchUp:
    """One replica's catching up: staged, committed and told."""

    def __init__(self, world: World, updates: FleetUpdates, member: Member, fleet: FleetClient) -> None:
        self._world, self._updates, self._member, self._fleet = world, updates, member, fleet
        self._core = core_of(member)

    def begin(self) -> None:
        """Begin as soon as nobody else changes the replica's weights."""
        if not self._member.updating.acquire(blocking=False):
            self._world.later(_LOOK_SECONDS, self.begin)
            return
        if not self._fleet.lags(self._member):
            self._member.updating.release()
            return
        assert self._updates.policy.newest is not None, "a replica lags only behind an update"
        self._newest = self._updates.policy.newest
        weights = Weights(self._newest.version, int(self._newest.digest))
        self._core.call(partial(self._core.stage, weights), self._staged)

    def _staged(self, result: Any) -> None:
        if result == (self._newest.version, self._newest.digest):
            self._core.call(self._core.commit, self._committed)
        else:
            self._failed(result if isinstance(result, Exception) else WeightUpdateError("other weights are there"))

    def _committed(self, result: Any) -> None:
        if isinstance(result, Exception):
            self._failed(result)
        else:
            self._world.note(f"{self._core.name} has caught up with version {self._newest.version}")
            self._tell(self._fleet.caught_up, self._newest.version)

    def _failed(self, problem: Exception) -> None:
        try:
            self._core.drop_staged_weights()
        except TransferTimeoutError as later:
            problem = later
        self._tell(self._fleet.not_caught_up, problem)

    def _tell(self, notice: Callable[..., None], what: Any) -> None:
        """Tell it late, and perhaps twice, before others may change the weights again."""

        def tell() -> None:
            for _ in range(1 + self._world.strikes("told twice")):
                notice(self._member, what)
            self._member.updating.release()

        self._world.later(self._world.choices.pick((0.0, 0.01, 0.3, 2.0, 10.0)), tell)


class UpdateRound:
    """One update of a fleet, as `FleetUpdates.push_to_replicas` does it, with answers that come as events."""

    def __init__(self, world: World, client: FleetClient) -> None:
        self._world, self._client, self._updates = world, client, client._updates
        self._errors: dict[int, Exception] = {}
        self._staged: dict[int, tuple[int, str]] = {}
        self._reports: dict[int, Any] = {}
        self._held: dict[int, Member] = {}

    def begin(self) -> None:
        """Begin, unless an update is under way or no replica lives."""
        if not self._updates._updating.acquire(blocking=False):
            return
        self._members = dict(self._client._members)
        version = self._client.policy_version + self._world.choices.pick((1, 1, 2))
        self._world.note(f"update to version {version} of replicas {sorted(self._members)}")
        self._weights = Weights(version, self._world.new_weights(version))
        self._deadline = self._world.events.now + CALL_SECONDS
        self._hold()

    def _hold(self) -> None:
        for index, member in self._members.items():
            if index not in self._held and member.updating.acquire(blocking=False):
                self._held[index] = member
        if len(self._held) < len(self._members) and self._world.events.now < self._deadline:
            self._world.later(_LOOK_SECONDS, self._hold)
            return
        for index in self._members.keys() - self._held.keys():
            self._errors[index] = TransferTimeoutError("it was still catching up")
        if self._held:
            self._ask(self._held, lambda core: partial(core.stage, self._weights), self._staged, self._commit)
        else:
            self._give_back()

    def _ask(
        self,
        members: Mapping[int, Member],
        work: Callable[[BrainCore], Callable[[], Any]],
        results: dict[int, Any],
        then: Callable[[], None],
    ) -> None:
        """Have every member do something; `then` follows when all have answered."""
        left = set(members)

        def answered(index: int, result: Any) -> None:
            (self._errors if isinstance(result, Exception) else results)[index] = result
            left.remove(index)
            if not left:
                then()

        for index, member in members.items():
            core = core_of(member)
            core.call(work(core), partial(answered, index))

    def _commit(self) -> None:
        try:
            check_same("the store", self._staged)
        except WeightUpdateError:
            self._finish()
            return
        ready = {index: self._held[index] for index in self._staged}
        if ready:
            version, digest = next(iter(self._staged.values()))
            self._world.digests[version] = int(digest)
            self._ask(ready, lambda core: core.commit, self._reports, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        missing = {index: member for index, member in self._held.items() if index not in self._reports}
        in_doubt = drop(missing, self._staged, self._reports, self._errors)
        if self._reports:
            self._updates.policy.newest = Published("the store", *next(iter(self._staged.values())))
        self._client._update_ended(self._members, self._reports, in_doubt)
        self._world.note(f"version {self._weights.version}: {sorted(self._reports)}, in doubt: {in_doubt}")
        self._give_back()

    def _give_back(self) -> None:
        for member in self._held.values():
            member.updating.release()
        if not self._reports:
            self._world.refuted.add(self._weights.version)
        self._updates._updating.release()


class CheckedLock:
    """The lock of a client that nobody else uses: it checks what it guards whenever it is given free."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._depth = check, 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: Any, *_: object) -> None:
        self._depth -= 1
        if not self._depth and kind is None:
            self._check()


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Have the fleet's client use the world's clock, and events in place of the supervisor's threads."""
    module: Any = fleet_client
    before = module.time, module.Supervisor
    module.time, module.Supervisor = world, EventSupervisor
    try:
        yield
    finally:
        module.time, module.Supervisor = before


def make_client(world: World) -> FleetClient:
    """A fleet of cores that have started. Inside `patched`, as long as it is used."""
    choices = world.choices
    first = choices.below(len(STRATEGIES))
    balancer = Balancer([*STRATEGIES[first:], *STRATEGIES[:first]], prefix_length=2)
    members = [make_member(world, index, f"{index}.first") for index in range(choices.pick((2, 3, 1, 4)))]
    provider: Any = world
    client = FleetClient(_CONFIG, provider, members, balancer)

    def check() -> None:
        brain = client._brain
        brain.check_integrity()
        brain.balancer.check_integrity()
        assert sorted(client._members) == sorted(brain.living), "those that live are not those with an engine"

    lock: Any = CheckedLock(check)
    client._lock = client._calls._lock = lock
    return client


def restart_all(world: World, client: FleetClient, indexes: list[int]) -> None:
    """Restart replicas one after the other, as `FleetClient.restart`, which waits on its thread."""
    if not indexes or client.dead_error is not None:
        return
    index, *others = indexes

    def look() -> None:
        state = client._brain.replicas[index].state
        if state in ("STARTING", "STALE"):
            world.later(0.5, look)
        elif state != "DEAD":
            restart_all(world, client, others)

    with client._lock:
        client._dispatcher.do(client._brain.restart_replica(index, world.monotonic()))
    look()


def newest(client: FleetClient) -> Weights:
    """The weights that every replica which serves has to have."""
    published = client._updates.policy.newest
    return Weights(0, 0) if published is None else Weights(published.version, int(published.digest))
