"""A rank on a machine of its own network, and what happens when that machine vanishes: nothing says goodbye.

Network namespaces stand in for machines; to make them takes root.
"""

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.children.process import environment_with_package
from rollout_engine.execution import process_executor, rank_launcher, remote_ranks
from rollout_engine.execution.remote_ranks import RemoteLauncher, arguments_of
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint
from tests.integration.test_ranks import PROMPTS, SAMPLED, all_of, running
from tests.integration.test_remote_ranks import Child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.skipif(
        shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and iproute2, for network namespaces"
    ),
]
HERE, THERE = "10.231.77.1", "10.231.77.2"
_NOTICED_SECONDS = 60
"""The kernel gives a connection up after half of it, within some seconds."""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def machine():
    """The name of a network namespace that one wire connects to this one's."""
    name, near, far = f"far-{os.getpid()}", f"a{os.getpid()}", f"b{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError:
        pytest.skip("this system makes no network namespaces")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("address", "add", f"{HERE}/24", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "address", "add", f"{THERE}/24", "dev", far)
        for each in (far, "lo"):
            ip("-n", name, "link", "set", each, "up")
        yield name, far
    finally:
        ip("netns", "delete", name)


class Far(Child):
    """A rank's process on the other machine."""

    def __init__(self, machine, arguments, variables):
        command = ["ip", "netns", "exec", machine, sys.executable, "-P", "-m", rank_launcher.MODULE, *arguments]
        environment = environment_with_package() | variables
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.name = f"process {self.process.pid} on {THERE}"


def test_a_machine_that_vanishes_ends_the_engine_and_nothing_waits(machine, monkeypatch, tmp_path):
    class Launcher(RemoteLauncher):
        def begin(self, settings, place):
            variables = {remote_ranks.TOKEN_VARIABLE: place.token, "OMP_NUM_THREADS": "1"}
            return Far(machine[0], arguments_of(place, settings.rank, self.meeting.num_ranks), variables)

    monkeypatch.setattr(process_executor, "_launcher_of", lambda *_: Launcher(HERE, 2))
    path = tiny_checkpoint(tmp_path, "qwen3")
    with running(path, 2) as engine:
        with running(path, 1) as whole:
            assert all_of(engine, "qwen3") == all_of(whole, "qwen3")
        noticed = []

        def generate():
            with pytest.raises(
                EngineDeadError, match=rf"rank 1 \(process \d+ on {THERE}\) has (ended|given no sign of life)"
            ):
                while True:
                    engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
            noticed.append(time.monotonic())

        waiting = threading.Thread(target=generate, daemon=True)
        waiting.start()
        time.sleep(1)
        ip("-n", machine[0], "link", "set", machine[1], "down")
        start = time.monotonic()
        waiting.join(_NOTICED_SECONDS)
        assert noticed
        print(f"noticed after {noticed[0] - start:.0f} s")
