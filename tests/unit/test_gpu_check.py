"""Tests and benchmarks that need a GPU say at once what is missing, and write nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.model import backends
from tests import gpu_check, gpu_report

ROOT = Path(__file__).parents[2]
without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")


def files_of(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def here(tmp_path):
    """A directory with the Makefile and the sources, where anything may be written."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for package in ("rollout_engine", "sync", "worker_ext", "envs_adapters"):
        (tmp_path / package).symlink_to(ROOT / package)
    shutil.copytree(ROOT / "tests" / "benchmarks", tmp_path / "tests" / "benchmarks")
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy(path, tmp_path / "tests")
    return tmp_path


@pytest.mark.slow
@without_device
@pytest.mark.parametrize("target", ["test-gpu", pytest.param("bench-gpu", marks=pytest.mark.slow)])
def test_a_target_of_make_without_a_device_fails_with_one_sentence_and_writes_nothing(here, target):
    before = files_of(here)
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    command = ["make", target, f"PYTHON={sys.executable}"]
    run = subprocess.run(command, cwd=here, capture_output=True, text=True, env=alone)
    said, made = run.stderr.splitlines()
    assert run.returncode and run.stdout == ""
    assert said == "This needs a GPU, and device='cuda' is not possible: torch finds no CUDA device."
    assert made.startswith("make: ***")
    assert files_of(here) == before


@pytest.mark.slow
@without_device
@pytest.mark.parametrize("module", ["tests.gpu_report", pytest.param("tests.benchmarks.gpu", marks=pytest.mark.slow)])
def test_a_program_for_a_device_fails_alike_without_one(here, module):
    before = files_of(here)
    run = subprocess.run([sys.executable, "-m", module], cwd=here, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "This needs a GPU, and device='cuda' is not possible: torch finds no CUDA device.\n"
    assert files_of(here) == before


@without_device
def test_the_reason_is_the_one_that_an_engine_gives():
    sentence = gpu_check.missing()
    with pytest.raises(ConfigError) as refused:
        backends.device_of(EngineConfig(model="none", device="cuda"))
    assert str(refused.value).startswith(sentence.removeprefix("This needs a GPU, and "))


def test_a_python_without_the_packages_is_told_so_before_they_are_imported():
    """`-S`: without the packages of this environment."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.gpu_report; tests.gpu_report.main()"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    (sentence,) = run.stderr.splitlines()
    assert "lacks: torch, transformers" in sentence and "make test-gpu PYTHON=" in sentence


def test_where_nothing_is_missing_the_check_lets_the_report_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(backends, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(gpu_report, "PARTS", {"one": gpu_report.Part((sys.executable, "-c", "print('ran')"), 60.0)})
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--parts", "one", "--out", str(tmp_path / "report.md")])
    gpu_report.main()
    assert "ran" in (tmp_path / "report.md").read_text() and "one: passed" in capsys.readouterr().out
