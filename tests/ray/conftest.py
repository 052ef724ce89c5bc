"""Programs that use Ray, each in a process of its own: Ray changes signals and limits of the process it runs in."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rollout_engine.testing import tiny_checkpoint

ROOT = Path(__file__).parents[2]
_SECONDS = 900


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture
def place():
    """A directory with a short name, for Ray's sockets. What still runs in it at the end is killed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "rollout-engine[ray]"')
    directory = tempfile.mkdtemp(prefix="ray-")
    yield Path(directory)
    for process in running_in(directory):
        process.kill()
    shutil.rmtree(directory)


@pytest.fixture
def run_scenarios(place, checkpoint):
    """A function that runs scenarios of `scenarios.py` in one program, and checks that nothing of it is left."""

    def run(*names):
        with start_program(place, checkpoint, *names) as program:
            output, _ = program.communicate(timeout=_SECONDS)
        assert program.returncode == 0, output
        assert_nothing_left(place)

    return run


def start_program(place, checkpoint, *names):
    """Start scenarios as a program, as `start_command` does."""
    command = [sys.executable, "-W", "error:::rollout_engine", "-m", "tests.ray.scenarios", str(checkpoint), *names]
    return start_command(place, command)


def start_command(place, command):
    """Start a program whose Ray, cores and temporary files all live in `place`."""
    for folder in ("home", "cores"):
        (place / folder).mkdir(exist_ok=True)
    added = dict(
        HOME=str(place / "home"),  # where Ray writes the token of a new cluster
        XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # of compiled kernels
        TMPDIR=str(place / "cores"),
        ROLLOUT_ENGINE_TEST_BEGUN=str(place / "begun"),
        RAY_TMPDIR=str(place),
        PYTHONPATH=str(ROOT),
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        command, env=kept | added, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_nothing_left(place):
    """No process of Ray or of a core, no temporary file of a core, and no shared memory."""
    deadline = time.monotonic() + 60
    while left := what_is_left(place):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def what_is_left(place):
    """What processes and files of a program are there."""
    processes = [f"{process.pid} {process.name()}" for process in running_in(place)]
    return processes + [str(path) for path in (place / "cores").glob("rollout-engine-*")]


def running_in(place):
    """Processes with `place` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(f"{place}/") and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found
