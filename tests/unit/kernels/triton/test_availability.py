"""Devices that the Triton kernels support, and the reasons given for others."""

import importlib.util
import subprocess
import sys

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


def test_a_hopper_with_triton_is_served(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert availability.unsupported_reason(CUDA) is None


def test_the_twins_load_without_triton():
    modules = "rollout_engine.kernels.paged_attention, rollout_engine.kernels.triton.availability"
    code = f"import sys; sys.modules['triton'] = None; import {modules}; print('loaded')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
