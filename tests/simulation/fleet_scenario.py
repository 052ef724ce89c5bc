"""What happens in a simulated run of a fleet: users, disasters, calm, and what must be so in the end."""

from collections import Counter

from tests.simulation.disasters import Disasters
from tests.simulation.faults import RandomFaults
from tests.simulation.fleet import Published, SimulatedFleet
from tests.simulation.fleet_users import FleetUsers
from tests.simulation.scheduler import Scheduler, SimulationFailed
from tests.simulation.transport import SimulatedTransport
from tests.simulation.users import check_versions

MAX_PAUSES = 200_000
"""A run that has not ended by then never does."""
_STORMY_ROUNDS, _ROUNDS = 40, 400
"""Seconds of the simulated clock in which something may fail, and until all that began has to be over."""


def run_fleet(
    scheduler: Scheduler,
    faults: RandomFaults,
    transport: SimulatedTransport,
    published: Published,
    outcomes: Counter[str],
    ends: Counter[str],
) -> None:
    """A fleet and its users, over cores in processes of their own that come and go."""
    choices = scheduler.choices
    fleet = SimulatedFleet(scheduler, faults, transport)
    users, disasters = FleetUsers(scheduler, fleet, faults), Disasters(scheduler, faults, fleet)
    try:
        faults.is_on = True
        users.start(1 + choices.below(3), 5 + choices.below(20))
        disasters.start(1 + choices.below(12))
        if choices.chance(0.1):
            scheduler.sleep(choices.pick([0.0, 0.01, 0.1, 1.0]))
            scheduler.note("shutdown")
            fleet.frontend.shutdown()
        _wait_for_users(scheduler, faults, users, disasters)
        users.ledger.assert_clean(versions_go_back=users.versions_go_back)
        users.check_calls()
        check_versions([users])
        outcomes.update(users.outcomes)
        ends.update(users.ledger.counts)
        if fleet.client.dead_error is None:
            _wait_until_settled(scheduler, fleet, users)
        if fleet.client.dead_error is None:
            _check_rest(scheduler, fleet)
        fleet.frontend.shutdown()
        for process in fleet.provider.processes:
            if hasattr(process, "engine"):
                process.engine.check_promises()
        scheduler.wait(lambda: not fleet.provider.alive, scheduler.clock.now + 60.0, "the end of all cores")
        fleet.check_ended()
        published.check_gone()
    finally:
        fleet.frontend.shutdown.detach()
    scheduler.wait(lambda: not scheduler.num_others, scheduler.clock.now + 60.0, "the end of all threads")


def _wait_for_users(scheduler: Scheduler, faults: RandomFaults, users: FleetUsers, disasters: Disasters) -> None:
    """Return when all is over; once it has been stormy for long, nothing fails, and what is paused goes on."""
    for number in range(_ROUNDS):
        deadline = scheduler.clock.now + 1.0
        if scheduler.wait(lambda: users.are_done and disasters.are_over, deadline, "users and disasters"):
            faults.is_on = False
            return
        faults.is_on = number < _STORMY_ROUNDS and not disasters.are_over
        if not faults.is_on or number % 4 == 3:
            users.calm()
    raise SimulationFailed("requests or calls never end")


def _wait_until_settled(scheduler: Scheduler, fleet: SimulatedFleet, users: FleetUsers) -> None:
    """Return when every replica that lives has caught up."""
    for _ in range(_ROUNDS):
        users.calm()
        if scheduler.wait(lambda: fleet.is_settled, scheduler.clock.now + 1.0, "replicas that catch up"):
            if users.engine_runs or fleet.client.dead_error is not None:
                return
    states = {index: str(replica.state) for index, replica in fleet.client._brain.replicas.items()}
    raise SimulationFailed(f"replicas never catch up: {states}")


def _check_rest(scheduler: Scheduler, fleet: SimulatedFleet) -> None:
    """Nothing may be left in replicas whose users are done, and all have the newest weights."""
    assert not len(fleet.client._brain.ledger), "requests are left in the ledger"
    assert not len(fleet.frontend.streams), "streams are left in the client"
    for process in fleet.serving:
        driver = process.driver
        scheduler.wait(lambda driver=driver: not driver.can_progress(), scheduler.clock.now + 10.0, "the last ends")
        with driver.lock:
            process.engine.check_rest(driver)
            version, newest = process.engine.core.policy_version, fleet.client.policy_version
            assert version == newest, f"{process.group} serves version {version}, and {newest} is the newest"
