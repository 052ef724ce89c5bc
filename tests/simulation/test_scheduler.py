"""Tasks run one at a time in the order of the choices; deadlocks, endless runs and errors of tasks end a run."""

import pytest

from tests.simulation.choices import Choices
from tests.simulation.clock import SimulatedClock
from tests.simulation.scheduler import Carriers, Scheduler, SimulationFailed
from tests.simulation.threads import SimulatedQueues, SimulatedThreading, SimulatedTime


@pytest.fixture(scope="module")
def carriers():
    with Carriers() as carriers:
        yield carriers


@pytest.fixture
def simulate(carriers):
    """Runs `main(threading, time, queue)` under a seed; returns the scheduler."""

    def run(main, seed=0):
        scheduler = Scheduler(Choices(seed), SimulatedClock(), carriers, restlessness=0.5)
        parts = SimulatedThreading(scheduler), SimulatedTime(scheduler), SimulatedQueues(scheduler)
        scheduler.run(lambda: main(*parts))
        return scheduler

    return run


def test_a_race_is_found_by_some_seeds_and_replayed_by_them(simulate):
    def lost_updates(seed):
        count = 0

        def main(threading, time, queue):
            def add():
                nonlocal count
                before = count
                time.sleep(0)
                count = before + 1

            threads = [threading.Thread(target=add) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        simulate(main, seed)
        return count

    counts = [lost_updates(seed) for seed in range(20)]
    assert {1, 3} <= set(counts)
    assert counts == [lost_updates(seed) for seed in range(20)]


@pytest.mark.parametrize("seed", range(20))
def test_locks_exclude_and_conditions_wake(simulate, seed):
    def main(threading, time, queue):
        condition, items, inside = threading.Condition(), [], []

        def take():
            with condition:
                condition.wait_for(lambda: items)
                inside.append(1)
                time.sleep(0.001)
                assert inside == [1]
                inside.clear()
                items.pop()

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            with condition:
                items.append(1)
                condition.notify()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()

    simulate(main, seed)


def test_idle_time_passes_at_once_and_deadlines_are_kept(simulate):
    def main(threading, time, queue):
        start, event = time.monotonic(), threading.Event()
        assert not event.wait(3600.0)
        assert 3600.0 <= time.monotonic() - start < 3601.0
        threading.Timer(5.0, event.set).start()
        assert event.wait(10.0)
        with pytest.raises(queue.Empty):
            queue.SimpleQueue().get(timeout=1.0)

    simulate(main)


def test_two_tasks_that_wait_for_each_other_are_a_deadlock(simulate):
    def main(threading, time, queue):
        first, second = threading.Lock(), threading.Lock()

        def take(one, other):
            with one:
                time.sleep(0.1)
                with other:
                    pass

        threading.Thread(target=take, args=(first, second), name="up").start()
        take(second, first)

    with pytest.raises(SimulationFailed, match="deadlock: main waits for a lock; up waits for a lock"):
        simulate(main)


def test_a_task_that_is_left_an_error_in_one_and_an_endless_run_fail(simulate):
    def leave(threading, time, queue):
        threading.Thread(target=threading.Event().wait, name="left").start()
        time.sleep(1.0)

    def stumble(threading, time, queue):
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(1.0)

    def spin(threading, time, queue):
        while True:
            time.sleep(0.1)

    with pytest.raises(SimulationFailed, match="left at the end: left waits for an event"):
        simulate(leave)
    with pytest.raises(ZeroDivisionError):
        simulate(stumble)
    with pytest.raises(SimulationFailed, match="does not end"):
        simulate(spin)


def test_a_killed_process_runs_no_further_and_a_frozen_one_goes_on_later(simulate):
    ran = []

    def main(threading, time, queue):
        def work(name, seconds):
            time.sleep(seconds)
            ran.append((name, time.monotonic()))

        scheduler = threading._scheduler
        scheduler.spawn("killed", lambda: work("killed", 1.0), "a")
        scheduler.spawn("frozen", lambda: work("frozen", 1.0), "b")
        time.sleep(0.5)
        scheduler.kill("a")
        scheduler.freeze("b", 10.0)
        time.sleep(20.0)

    simulate(main)
    ((name, at),) = ran
    assert name == "frozen" and at >= 1010.0
