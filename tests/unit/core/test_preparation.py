"""Requests that need something before their first step are kept back, and stall nobody."""

import threading

import pytest

PREPARED = {"min_p": 0.5}


@pytest.fixture
def rig(make_rig):
    rig = make_rig()
    rig.ready, rig.asked = threading.Event(), []

    def wait(seconds):
        rig.asked.append(seconds)
        return rig.ready.wait(seconds)

    rig.core._prepare = lambda params: wait if params.min_p else None
    return rig


def test_others_go_on_while_a_request_is_prepared_and_it_follows(rig):
    rig.add("prepared", max_tokens=3, **PREPARED)
    rig.add("other", max_tokens=5)
    while ("other", 0) not in rig.ends:
        rig.step()
    assert ("prepared", 0) not in rig.ends and rig.core.num_unfinished_requests == 1
    assert max(rig.asked) == 0  # nobody waited
    rig.step()
    assert rig.asked[-1] > 0  # but where there is nothing else to do
    rig.ready.set()
    rig.run()
    assert ("prepared", 0) in rig.ends


def test_a_request_that_is_aborted_before_it_is_prepared_has_its_end(rig):
    rig.add("prepared", max_tokens=3, **PREPARED, n=2)
    rig.step()
    for name in ("0_prepared", "1_prepared"):
        rig.abort(name)
        rig.core.check_integrity()
    assert not rig.core.num_unfinished_requests
    rig.ready.set()
    rig.run()


def test_a_request_that_comes_while_paused_is_prepared_from_resume_on(rig):
    rig.core.pause("keep")
    rig.add("prepared", max_tokens=3, **PREPARED)
    assert not rig.asked
    rig.core.resume()
    rig.core.check_integrity()
    rig.ready.set()
    rig.run()
    assert ("prepared", 0) in rig.ends
