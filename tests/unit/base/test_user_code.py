"""Interrupts reach the user's code inside its block, and nothing outside it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollout_engine.base.errors import StepDeadlineError
from rollout_engine.base.user_code import UserCode, running_on


def interrupt_when_running(message, thread):
    def run():
        while (code := running_on([thread])) is None:
            time.sleep(0.001)
        code.interrupt(message)

    threading.Thread(target=run, daemon=True).start()


def loop():
    while True:
        time.sleep(0.001)


def test_a_loop_is_interrupted_with_the_message_and_nothing_is_left():
    here = threading.get_ident()
    interrupt_when_running("m:P did not return", here)
    with pytest.raises(StepDeadlineError, match="^m:P did not return$"), UserCode(lambda: "m:P"):
        loop()
    assert running_on([here]) is None


def test_a_block_inside_a_block_is_named_first_and_the_outer_one_again_after_it():
    here = threading.get_ident()
    with UserCode(lambda: "outer"):
        with UserCode(lambda: "inner"):
            assert running_on([here]).describe() == "inner"
        assert running_on([here]).describe() == "outer"
    assert running_on([here]) is None


def test_an_interrupt_that_comes_too_late_is_dropped():
    with UserCode(lambda: "m:P") as _:
        code = running_on([threading.get_ident()])
    code.interrupt("too late")
    for _ in range(1000):
        pass
    assert code.message == ""


def test_interrupts_at_any_instant_are_raised_inside_the_block_or_not_at_all():
    here, over = threading.get_ident(), threading.Event()

    def interrupt():
        while not over.is_set():
            if (code := running_on([here])) is not None and not code.message:
                code.interrupt("now")
            time.sleep(0)

    thread = threading.Thread(target=interrupt)
    thread.start()
    num_interrupted = num_outside = 0
    deadline = time.monotonic() + 60
    try:
        while num_interrupted < 200 and time.monotonic() < deadline:
            try:
                with UserCode(lambda: "m:P"):
                    sum(range(50))
                    time.sleep(0)
            except StepDeadlineError:
                num_interrupted += 1
            try:
                sum(range(50))
            except StepDeadlineError:
                num_outside += 1
    finally:
        over.set()
        thread.join()
    assert num_interrupted == 200 and num_outside == 0
    assert running_on([here]) is None


@pytest.mark.quick(2)
@pytest.mark.parametrize("end, status", [("return", 1), ("raise", 1), ("exit", 7), ("exit quietly", 0)])
def test_a_child_forked_inside_ends_with_the_block(end, status, capfd):
    ours = os.getpid()
    with UserCode(lambda: "m:P"):
        child = os.fork()
        if child == 0 and end == "raise":
            raise ValueError("in the child")
        if child == 0 and end.startswith("exit"):
            sys.exit(7 if end == "exit" else None)
    if os.getpid() != ours:
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert ("m:P: a child process that it forked" in capfd.readouterr().err) == (status == 1)


TRACED = """
import sys
from tests.unit.base import test_user_code

test_user_code.test_interrupts_at_any_instant_are_raised_inside_the_block_or_not_at_all()
sys.settrace(lambda *_: None)
(lambda: None)()
"""


def test_code_can_be_traced_after_interrupts():
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=300, cwd=Path(__file__).parents[3])
