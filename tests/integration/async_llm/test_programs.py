"""Programs of users, run as such: their own classes reach the core's process."""

import subprocess
import sys

import pytest

from rollout_engine.testing import tiny_checkpoint

BESIDE = """
from worker_ext.base import WorkerExtension, rpc

class Beside(WorkerExtension):
    @rpc
    def beside(self) -> str:
        return __name__
"""
PROGRAM = """
import asyncio, os
from rollout_engine import AsyncLLM
from worker_ext.base import WorkerExtension, rpc

class Mine(WorkerExtension):
    @rpc
    def mine(self) -> tuple[str, int]:
        return __name__, os.getpid()

class Rules:
    def __init__(self, vocab_size): pass
    def wants(self, params): return False
    def apply(self, logits, sequence): return logits

def main():
    options = dict(num_kv_blocks=64, worker_extensions=[Mine, "beside:Beside"], logits_processors=[Rules])
    with AsyncLLM("CHECKPOINT", **options) as engine:
        (name, pid), = asyncio.run(engine.collective_rpc("mine"))
        assert name == "program" and pid != os.getpid()
        assert asyncio.run(engine.collective_rpc("beside")) == ["beside"]
    print("done")

"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(tmp_path, checkpoint):
    """A function that runs a program, with modules beside it, from another folder."""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "folder").mkdir()
        (tmp_path / "beside.py").write_text(BESIDE)
        (tmp_path / "program.py").write_text(program.replace("CHECKPOINT", str(checkpoint)))
        command = [sys.executable, "../program.py"]
        return subprocess.run(command, cwd=tmp_path / "folder", capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_classes_of_the_program_and_of_modules_beside_it_serve_in_the_cores_process(run):
    done = run(PROGRAM + "if __name__ == '__main__':\n    main()\n")
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
def test_a_program_without_a_guard_is_told_to_have_one(run):
    done = run(PROGRAM + "main()\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "rollout_engine.base.errors.ConfigError: worker_extensions: 'program:Mine' cannot be loaded: ConfigError: "
        "an engine is started where the core's process imports the program: put what the program runs under "
        '`if __name__ == "__main__":`.'
    )
