"""Devices that the Triton kernels support, and the reasons given for others."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from rollout_engine.kernels.triton import availability

CUDA = torch.device("cuda")


def test_a_cpu_is_not_served():
    assert "the device is cpu" in availability.unsupported_reason(torch.device("cpu"))


@pytest.mark.parametrize(
    ("triton", "cuda", "capability", "reason"),
    [
        (None, True, (9, 0), "rollout-engine[gpu]"),
        (object(), False, (9, 0), "no CUDA device"),
        (object(), True, (8, 6), "8.6"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, triton, cuda, capability, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reason in availability.unsupported_reason(CUDA)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A Hopper, with Triton and what that needs; returns where Python's headers are."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    return tmp_path


def test_a_hopper_with_triton_is_served(hopper):
    assert availability.unsupported_reason(CUDA) is None


def test_a_missing_c_compiler_is_named(hopper, monkeypatch):
    monkeypatch.setenv("CC", "icc")
    assert "no C compiler CC='icc' (Debian and Ubuntu: apt install gcc)" in availability.unsupported_reason(CUDA)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C compiler (Debian" in availability.unsupported_reason(CUDA)


def test_missing_headers_of_python_are_named(hopper):
    (hopper / "Python.h").unlink()
    assert f"{hopper}/Python.h is missing" in availability.unsupported_reason(CUDA)


def test_a_program_that_compiles_for_triton_needs_neither(hopper, monkeypatch):
    (hopper / "Python.h").unlink()
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(build=SimpleNamespace(impl=print)))
    assert availability.unsupported_reason(CUDA) is None


def test_the_twins_load_without_triton():
    modules = "rollout_engine.kernels.paged_attention, rollout_engine.kernels.triton.availability"
    code = f"import sys; sys.modules['triton'] = None; import {modules}; print('loaded')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
