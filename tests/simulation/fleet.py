"""A fleet in a simulated run: the real client, brain, supervisor and updates, over simulated cores."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.engine.client import Route
from rollout_engine.faces.frontend import Frontend
from rollout_engine.fleet.plan.actions import Action, Send
from rollout_engine.fleet.plan.balancer import STRATEGIES, Balancer
from rollout_engine.fleet.plan.replica_state import ReplicaState
from rollout_engine.fleet.run import publication
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_endpoint import LocalEndpoint
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.process_client import ProcessClient
from sync.store import StoreReceiver
from tests.simulation.core_process import SimulatedCoreProcess
from tests.simulation.engine import Sizes
from tests.simulation.faults import RandomFaults
from tests.simulation.scheduler import Scheduler
from tests.simulation.session_homes import SessionHomes
from tests.simulation.threads import SimulatedRLock
from tests.simulation.transport import SimulatedTransport

HANG_SECONDS = 5.0
MAX_REPLICAS = 5
"""More of them at a time find no room."""


class SimulatedReplica:
    """A replica of the simulated provider."""

    def __init__(self, client: ProcessClient, process: SimulatedCoreProcess) -> None:
        self.client, self.node, self.process = client, process.group, process

    def near(self, store: str, seconds: float) -> str:
        """Where the store is: all are on one machine."""
        return store

    def end(self, *, kill: bool = False) -> None:
        """End the core."""
        self.client.shutdown()


class SimulatedProvider:
    """A `fleet.provider.Provider` whose replicas are simulated cores, all of one random size."""

    def __init__(self, scheduler: Scheduler, faults: RandomFaults, transport: SimulatedTransport) -> None:
        self._scheduler, self._faults, self._transport = scheduler, faults, transport
        self.sizes = Sizes.drawn(scheduler.choices)
        self.processes: list[SimulatedCoreProcess] = []
        """All that were ever started."""
        self.is_shut_down = False

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        """Raise `ConfigError` where there is no room for so many more."""
        alive = len(self.alive)
        if num_more + alive > MAX_REPLICAS:
            raise ConfigError(f"{num_more} more replicas, beside {alive}, are more than {MAX_REPLICAS}.")

    def share(self, config: EngineConfig, num_replicas: int) -> EngineConfig:
        """Leave the configuration as it is: simulated cores share nothing."""
        return config

    def start(self, index: int, config: EngineConfig) -> SimulatedReplica:
        """Start a core, which takes time and may fail."""
        self._faults.reach("start")
        self._scheduler.sleep(self._scheduler.choices.pick([0.0, 0.01, 0.3]))
        name = f"core {index}.{len(self.processes)}"
        process = SimulatedCoreProcess(self._scheduler, self._faults, self._transport, self.sizes, name)
        self.processes.append(process)
        if process.status is not None:
            raise EngineDeadError(process.reason)
        try:
            core = LocalEndpoint(process.directory)
            client = ProcessClient(ClientSocket(core, process, HANG_SECONDS))  # type: ignore[arg-type]
        except BaseException:
            process.end(kill=True)
            raise
        return SimulatedReplica(client, process)

    def close(self) -> None:
        """Let what is starting start: it is ended then."""

    def shutdown(self) -> None:
        """Note that the fleet has ended."""
        self.is_shut_down = True

    @property
    def alive(self) -> list[SimulatedCoreProcess]:
        """Those that run."""
        return [process for process in self.processes if process.status is None]

    def links_of(self, process: SimulatedCoreProcess) -> list[Any]:
        """The connections of a core."""
        return self._transport.links_of(address_in(process.directory))


class SimulatedFleet:
    """A fleet and its front end, watched: what may never be so is looked for after every event."""

    def __init__(self, scheduler: Scheduler, faults: RandomFaults, transport: SimulatedTransport) -> None:
        choices = scheduler.choices
        self._scheduler = scheduler
        self.provider = SimulatedProvider(scheduler, faults, transport)
        first = choices.below(len(STRATEGIES))
        balancer = Balancer([*STRATEGIES[first:], *STRATEGIES[:first]], prefix_length=2)
        config = EngineConfig(model="formula", skip_tokenizer_init=True)
        count = choices.pick([2, 3, 1, 4])
        self.client = FleetClient.start(config, num_replicas=count, provider=self.provider, balancer=balancer)
        lock = _CheckedLock(scheduler, self._check_client)
        self.client._lock = self.client._calls._lock = lock  # type: ignore[assignment]
        self.frontend = Frontend(self.client, None)
        self.frontend.shutdown.atexit = False
        self.versions_go_back: Callable[[], bool] = lambda: False
        self._least: dict[int, int] = {}
        """Sequence id -> version that its tokens have at least: the newest one as it was added."""
        self.ends: Counter[int] = Counter()
        """Sequence id -> how often its user was told of its end."""
        deliver, add = self.frontend.streams.deliver, self.client.add_request
        homes, do = SessionHomes(self.client._brain), self.client._dispatcher.do

        def add_watched(request: EngineCoreRequest, route: Route) -> None:
            first = request.first_sequence_id
            self._least |= dict.fromkeys(range(first, first + request.params.n), self.client.policy_version)
            homes.opened(range(first, first + request.params.n), route.session_id)
            add(request, route)

        def do_watched(actions: Iterable[Action], **options: Any) -> None:
            actions = list(actions)
            for action in actions:
                if isinstance(action, Send):
                    self._look(partial(homes.sent, action.replica, action.request.first_sequence_id))
            do(actions, **options)

        self.client._dispatcher.do = do_watched  # type: ignore[method-assign]

        self.client.add_request = add_watched  # type: ignore[method-assign]

        def deliver_watched(outputs: EngineCoreOutputs) -> None:
            self._look(partial(self._check_outputs, outputs))
            deliver(outputs)

        self.frontend.streams.deliver = deliver_watched  # type: ignore[method-assign]

    @property
    def is_settled(self) -> bool:
        """Whether every replica serves, or is gone for good."""
        settled = (ReplicaState.SYNCED, ReplicaState.DEAD)
        return all(replica.state in settled for replica in self.client._brain.replicas.values())

    @property
    def serving(self) -> list[SimulatedCoreProcess]:
        """The cores of the replicas that serve."""
        members = self.client._members
        return [members[index].replica.process for index in self.client._brain.serving]  # type: ignore[attr-defined]

    def check_ended(self) -> None:
        """AssertionError unless nothing is left of a fleet that is shut down."""
        left = [process.group for process in self.provider.alive]
        assert not left, f"these cores are left: {left}"
        assert self.provider.is_shut_down, "the provider is not shut down"
        supervisor = self.client._supervisor
        assert not supervisor._threads, f"threads of the supervisor are left: {supervisor._threads}"
        assert not self.client._members, "replicas are left"

    def _look(self, check: Callable[[], object]) -> None:
        """End the run where a check fails: whoever calls may take it for an error of its own."""
        try:
            check()
        except AssertionError as error:
            self._scheduler.fail(error)

    def _check_client(self) -> None:
        client = self.client
        client._brain.check_integrity()
        client._brain.balancer.check_integrity()
        if not client._supervisor.is_closed:
            members, living = sorted(client._members), sorted(client._brain.living)
            assert members == living, f"replicas {members} have an engine, and {living} live"

    def _check_outputs(self, outputs: EngineCoreOutputs) -> None:
        for sequence_id in outputs.sequence_ids:
            served, least = outputs.policy_version, self._least[sequence_id]
            if not self.versions_go_back():
                assert served >= least, f"a token of version {served}, asked for after the commit of {least} was noted"
            assert not self.ends[sequence_id], f"sequence {sequence_id} has a token after its end"
        for end in outputs.ended:
            self._scheduler.note(f"sequence {end.sequence_id} ends: {end.finish_reason}")
            self.ends[end.sequence_id] += 1
            assert self.ends[end.sequence_id] == 1, f"sequence {end.sequence_id} has ended twice"


class _CheckedLock(SimulatedRLock):
    """A lock that checks what it guards whenever it is given free."""

    def __init__(self, scheduler: Scheduler, check: Callable[[], object]) -> None:
        super().__init__(scheduler)
        self._check = check

    def release(self) -> None:
        if self._depth == 1:
            try:
                self._check()
            except AssertionError as error:
                self._scheduler.fail(error)
        super().release()


class Published:
    """The directories in which a fleet's weights are published: real ones."""

    def __init__(self) -> None:
        self.directories: list[Path] = []

    def patches(self, faults: RandomFaults) -> list[tuple[Any, str, Any]]:
        """(object, name, what stands there): directories are noted, and reading them takes time and may fail."""
        make, receive = publication.StoreDirectory, StoreReceiver.receive_into

        def make_noted() -> Any:
            faults.reach("offer")
            directory = make()
            self.directories.append(directory.path)
            return directory

        def receive_slowly(receiver: StoreReceiver, *args: Any, **options: Any) -> Any:
            faults.reach("read")
            found = receive(receiver, *args, **options)
            faults.reach("read")
            return found

        return [(publication, "StoreDirectory", make_noted), (StoreReceiver, "receive_into", receive_slowly)]

    def check_gone(self) -> None:
        """AssertionError where one is left."""
        left = [str(directory) for directory in self.directories if directory.exists()]
        assert not left, f"published weights are left: {left}"
