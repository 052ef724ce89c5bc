"""The watch over a part of the soak: whatever becomes of the part, there is a record that says so."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.watch import Limits, watch

ROOT = Path(__file__).parents[2]
LIMITS = Limits(hang_seconds=600.0, memory_gib=64.0)
PART = """
import os, signal, sys, time
from tests.faults.progress import be_watched, report, tell
be_watched(int(sys.argv[-1]))
report(7)
"""


def run(tmp_path, code, limits=LIMITS):
    """The figure of a part that runs `code`, what was noted meanwhile, and its log."""
    noted, log = [], tmp_path / "log"
    figure = watch([sys.executable, "-c", PART + code], log, limits, noted.append)
    return figure, noted, log.read_text()


def test_a_part_that_ends_well_has_its_figures(tmp_path):
    figure, noted, _ = run(tmp_path, "tell({'figure': {'requests': 3, 'leaks': 0}})")
    assert "failure" not in figure and (figure["requests"], figure["leaks"]) == (3, 0)
    assert figure["seconds"] >= 0
    assert [each["failure"] for each in noted] == ["it is running, or whoever watched it was killed"]


@pytest.mark.parametrize(
    "code, failure",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it was killed by SIGSEGV"),
        ("raise AssertionError('a leak')", "it raised: status 1"),
        ("sys.exit(0)", "it exited with status 0, without a figure"),
    ],
)
def test_a_part_that_dies_leaves_its_failure_how_far_it_came_and_its_log(tmp_path, code, failure):
    figure, _, log = run(tmp_path, code)
    assert figure["failure"].startswith(failure) and figure["done"] == 7
    assert "AssertionError: a leak" in log or "a leak" not in code
    assert "Segmentation fault" in log or "SIGSEGV" not in code


@pytest.mark.slow
def test_a_part_that_makes_no_progress_is_ended_with_its_stacks_and_tasks_in_the_log(tmp_path):
    code = """
import asyncio
async def stuck_task():
    while True:
        await asyncio.sleep(0.05)
async def stuck_part():
    task = asyncio.create_task(stuck_task())
    await asyncio.sleep(3600)
asyncio.run(stuck_part())
"""
    figure, _, log = run(tmp_path, code, Limits(hang_seconds=3.0, memory_gib=64.0))
    assert figure["failure"].startswith("it hangs: no progress for") and figure["done"] == 7
    assert "in run" in log and "stuck_task" in log and "stuck_part" in log


@pytest.mark.slow
def test_a_part_that_takes_too_much_memory_is_ended_before_the_system_is_out_of_it(tmp_path):
    code = "held = bytearray(1 << 29)\nheld[::4096] = bytes(1 << 17)\ntime.sleep(3600)"
    figure, _, log = run(tmp_path, code, Limits(hang_seconds=600.0, memory_gib=0.4))
    assert figure["failure"].startswith("it holds 0.") and "more than 0.4" in figure["failure"]
    assert figure["most_memory_gib"] >= 0.4 and "Current thread" in log


def test_a_part_whose_watch_is_told_to_end_is_recorded_and_ended_too(tmp_path):
    code = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(3600)"
    watcher = f"""
import json, sys
from pathlib import Path
from tests.faults.watch import Limits, watch
folder = Path(sys.argv[1])
watch([sys.executable, "-c", {PART + code!r}], folder / "log", Limits(600.0, 64.0),
      lambda figure: (folder / "figure").write_text(json.dumps(figure)))
"""
    process = subprocess.Popen([sys.executable, "-c", watcher, str(tmp_path)], cwd=ROOT)
    try:
        pid = tmp_path / "pid"
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        part = psutil.Process(int(pid.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    assert "SIGTERM came" in json.loads((tmp_path / "figure").read_text())["failure"]
    assert not part.is_running() or part.status() == psutil.STATUS_ZOMBIE
    assert os.path.exists(tmp_path / "log")
