"""What the supervisor of a fleet does on its threads."""

import threading
from types import SimpleNamespace

import pytest

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.fleet.run.supervisor import Supervisor


class Heard:
    """A fleet that notes what it is told, and whether others could change the replica's weights meanwhile."""

    def __init__(self, is_lagging=True):
        self.notices, self.is_lagging = [], is_lagging

    def lags(self, member):
        return self.is_lagging

    def caught_up(self, member, version):
        self.notices.append(("caught up", version, member.updating.locked()))

    def not_caught_up(self, member, problem):
        self.notices.append(("not caught up", str(problem), member.updating.locked()))


def catch_up(member, fleet, update):
    """Have a supervisor bring a replica up to date by `update`."""
    supervisor = Supervisor(SimpleNamespace(close=lambda: None, shutdown=lambda: None), None, None)
    supervisor._updates = SimpleNamespace(catch_up=update)
    supervisor.catch_up(member, 0.0, fleet)
    for thread in list(supervisor._threads):
        thread.join()
    supervisor.close()
    supervisor.end([])


@pytest.mark.parametrize("is_broken", [False, True])
def test_how_a_catch_up_ended_is_told_before_an_update_can_change_the_replica_again(is_broken):
    def update(member):
        assert member.updating.locked()
        if is_broken:
            raise WeightUpdateError("the disk is broken")
        return 5

    member, fleet = SimpleNamespace(index=0, updating=threading.Lock()), Heard()
    catch_up(member, fleet, update)
    expected = ("not caught up", "the disk is broken", True) if is_broken else ("caught up", 5, True)
    assert fleet.notices == [expected]
    assert not member.updating.locked()


def test_a_replica_that_an_update_has_overtaken_is_left_as_it_is():
    member, fleet = SimpleNamespace(index=0, updating=threading.Lock()), Heard(is_lagging=False)
    catch_up(member, fleet, lambda member: pytest.fail("its weights are the newest, and it serves"))
    assert fleet.notices == []
    assert not member.updating.locked()
