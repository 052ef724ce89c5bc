"""Times between machines whose clocks count from different starts."""

import msgspec

from rollout_engine.base.messages import EngineCoreOutputs
from rollout_engine.process.core_clock import CoreClock, SharedClock
from rollout_engine.process.wire import Abort, Call, Heartbeat, Outputs, Welcome
from tests.faults.peers import READY

NOTHING = msgspec.Raw(b"\x80")


def test_a_deadline_is_put_on_the_cores_clock_never_later_than_it_is():
    clock = CoreClock()
    true_offset = 1000.0
    for now, delay in ((10.0, 0.5), (11.0, 0.1), (12.0, 3.0)):
        sent_at = now - delay + true_offset
        clock.adjust_times(Welcome(0, READY, clock=sent_at) if now == 10.0 else Heartbeat(sent_at), now)
    assert clock.departing(Call(1, "name", NOTHING, deadline=20.0)).deadline == 20.0 + true_offset - 0.1
    for message in (Call(1, "name", NOTHING), Abort([1])):
        assert clock.departing(message) is message


def test_a_clock_that_drifts_is_followed():
    clock = CoreClock()
    for i in range(100):
        clock.adjust_times(Heartbeat(1000.0 - i), 0.0)
    assert 1000.0 - 100 < clock.departing(Call(1, "name", NOTHING, deadline=0.0)).deadline < 1000.0 - 80


def test_the_start_of_a_step_is_put_on_the_clients_clock_and_is_not_to_come():
    clock = CoreClock()
    clock.adjust_times(Heartbeat(1010.0), 10.0)
    steps = [EngineCoreOutputs(0, start_time=start) for start in (1011.0, 1013.0, 0.0)]
    clock.adjust_times(Outputs(steps), 12.0)
    assert [step.start_time for step in steps] == [11.0, 12.0, 0.0]


def test_on_one_machine_nothing_is_converted():
    clock, call, steps = SharedClock(), Call(1, "name", NOTHING, deadline=20.0), [EngineCoreOutputs(0, start_time=7.0)]
    clock.adjust_times(Welcome(0, READY, clock=1000.0), 1.0)
    clock.adjust_times(Outputs(steps), 2.0)
    assert clock.departing(call) is call and steps[0].start_time == 7.0
