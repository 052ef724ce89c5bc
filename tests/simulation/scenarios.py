"""What happens in a simulated run: an engine, its users, and what becomes of it while they use it."""

from collections import Counter

from rollout_engine.engine.driver import EngineDriver
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_endpoint import LocalEndpoint
from rollout_engine.process.process_client import ProcessClient
from tests.faults.ledger import Ledger
from tests.simulation.core_process import SimulatedCoreProcess
from tests.simulation.engine import SimulatedEngine, Sizes
from tests.simulation.faults import RandomFaults
from tests.simulation.scheduler import Scheduler, SimulationFailed
from tests.simulation.transport import SimulatedTransport
from tests.simulation.users import ERRORS, Users, check_versions

_CALM_ROUNDS = 60
"""Seconds of the simulated clock that users may take once nothing fails any more."""
_HANG_SECONDS = 5.0


def run_in_process(scheduler: Scheduler, faults: RandomFaults, outcomes: Counter[str], ends: Counter[str]) -> None:
    """One engine in this process: the real front end, client, driver, core, executor and weight transaction."""
    choices = scheduler.choices
    engine = SimulatedEngine(scheduler, faults, Sizes.drawn(choices))
    client = LocalClient(engine.core, engine.executor, engine.worker.info, own_thread=choices.chance(0.5))
    engine.watch(client.driver)
    frontend = Frontend(client, None)
    users = _users_of(scheduler, frontend, engine, faults)
    try:
        faults.is_on = True
        users.start(1 + choices.below(3), 2 + choices.below(6))
        if choices.chance(0.15):
            scheduler.sleep(choices.pick([0.0, 0.001, 0.01, 0.1]))
            scheduler.note("shutdown")
            frontend.shutdown()
        _wait_for_users(scheduler, faults, [users])
        _check_users([users], outcomes, ends)
        if not engine.core.lifecycle.dead:
            users.calm()
            while client.driver.can_progress() and client.turn(lambda: False):
                pass  # ends of requests whose readers have left
            _check_rest(scheduler, engine, client.driver)
        frontend.shutdown()
        engine.check_promises()
    finally:
        frontend.shutdown.detach()
    _wait_for_tasks(scheduler)


def run_own_process(
    scheduler: Scheduler,
    faults: RandomFaults,
    transport: SimulatedTransport,
    outcomes: Counter[str],
    ends: Counter[str],
) -> None:
    """One engine in a process of its own, its owner and perhaps other clients, over a simulated wire."""
    choices = scheduler.choices
    process = SimulatedCoreProcess(scheduler, faults, transport, Sizes.drawn(choices))
    owner = _Client(scheduler, faults, process, is_owner=True)
    others: list[_Client] = []
    try:
        faults.is_on = True
        owner.users.start(1 + choices.below(2), 2 + choices.below(5))
        for number in range(choices.pick([0, 1, 0, 2])):
            others += _connect(scheduler, faults, process, number)
        happens = choices.pick(_EVENTS)
        scheduler.sleep(choices.pick([0.0, 0.001, 0.01, 0.1]))
        scheduler.note(happens)
        _happen(happens, scheduler, process, owner, others)
        present = [client for client in (owner, *others) if not client.is_killed]
        _wait_for_users(scheduler, faults, [client.users for client in present])
        _check_users([client.users for client in present], outcomes, ends)
        scheduler.sleep(1.0)  # what clients sent before they left still arrives
        if process.status is None and not owner.has_left:
            owner.users.calm()
            if owner.frontend.client.dead_error is None:
                _check_rest(scheduler, process.engine, process.driver)
        for client in (*others, owner):
            if not client.is_killed:
                process.wire.wait(scheduler, client.index)
                client.frontend.shutdown()
                process.wire.check(client.index, is_connected=not client.has_left)
        process.engine.check_promises()
        may_be_killed = happens in ("kill", "hang", "shutdown") or faults.counts["clock"]  # it is given some seconds
        assert process.status == 0 or (process.status == -9 and may_be_killed), f"the core ended: {process.reason}"
    finally:
        for client in (owner, *others):
            client.frontend.shutdown.detach()
    _wait_for_tasks(scheduler)


_EVENTS = ["nothing", "nothing", "nothing", "sigterm", "kill", "hang", "shutdown", "client leaves", "client dies"]


def _users_of(scheduler: Scheduler, frontend: Frontend, engine: SimulatedEngine, faults: RandomFaults) -> Users:
    """Users of a client of an engine."""
    worker = engine.worker
    return Users(scheduler, frontend, Ledger(), worker.notes, faults, worker.step_seconds)


class _Client:
    """A client of the core: its front end and its users."""

    is_killed = has_left = False

    def __init__(
        self, scheduler: Scheduler, faults: RandomFaults, process: SimulatedCoreProcess, *, is_owner: bool
    ) -> None:
        core, owned = LocalEndpoint(process.directory), process if is_owner else None
        self.socket = ClientSocket(core, owned, _HANG_SECONDS)  # type: ignore[arg-type]
        client = ProcessClient(self.socket)
        self.index = client.index
        self.frontend = Frontend(client, None)
        self.frontend.shutdown.atexit = False
        process.wire.watch_client(self.frontend)
        self.users = _users_of(scheduler, self.frontend, process.engine, faults)


def _connect(scheduler: Scheduler, faults: RandomFaults, process: SimulatedCoreProcess, number: int) -> list[_Client]:
    """Another client, in a process of its own with its users; none where its descriptors run out."""
    found: list[_Client | None] = []

    def run() -> None:
        try:
            client = _Client(scheduler, faults, process, is_owner=False)
        except ERRORS as error:
            scheduler.note(f"no client: {type(error).__name__}")
            found.append(None)
            return
        client.users.start(1, 2 + scheduler.choices.below(3))
        found.append(client)

    scheduler.spawn(f"client {number}", run, f"client {number}")
    scheduler.wait(lambda: bool(found), None, "a client")
    return [client for client in found if client is not None]


def _happen(
    what: str, scheduler: Scheduler, process: SimulatedCoreProcess, owner: _Client, others: list[_Client]
) -> None:
    if what == "sigterm":
        process.terminate()
    elif what == "kill":
        process.kill()
    elif what == "hang":
        scheduler.freeze(process.group, scheduler.choices.pick([0.3, 3.0, 20.0]))
    elif what == "shutdown":
        owner.has_left = True
        owner.frontend.shutdown()
    elif others and what == "client leaves":
        others[0].has_left = True
        others[0].frontend.shutdown()
    elif others and what == "client dies":
        others[0].is_killed = True
        scheduler.kill("client 0")
        others[0].socket._link.socket.link.cut()


def _check_users(all_users: list[Users], outcomes: Counter[str], ends: Counter[str]) -> None:
    for users in all_users:
        users.ledger.assert_clean(versions_go_back=any(each.versions_go_back for each in all_users))
        users.check_calls()
        assert not len(users.frontend.streams), "streams are left in the client"
        outcomes.update(users.outcomes)
        ends.update(users.ledger.counts)
    check_versions(all_users)


def _check_rest(scheduler: Scheduler, engine: SimulatedEngine, driver: EngineDriver) -> None:
    """Nothing may be left in a core whose clients are done."""
    scheduler.wait(lambda: not driver.can_progress(), scheduler.clock.now + 10.0, "the last ends")
    with driver.lock:
        engine.check_rest(driver)


def _wait_for_users(scheduler: Scheduler, faults: RandomFaults, all_users: list[Users]) -> None:
    """Return when all users are done; once they have been busy for long, nothing fails, and what is paused goes on."""
    for _ in range(_CALM_ROUNDS):
        if scheduler.wait(lambda: all(users.are_done for users in all_users), scheduler.clock.now + 1.0, "its users"):
            faults.is_on = False
            return
        faults.is_on = False
        all_users[0].calm()
    raise SimulationFailed("requests or calls never end")


def _wait_for_tasks(scheduler: Scheduler) -> None:
    """Return when no thread is left; `Scheduler.run` fails where one stays."""
    deadline = scheduler.clock.now + 60.0
    scheduler.wait(lambda: not scheduler.num_others, deadline, "the end of all threads")
