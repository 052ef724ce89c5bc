"""Which backend computes on a device, and what is said where none does."""

import subprocess
import sys

import pytest

CODE = """
import sys

sys.modules["triton"] = None
import torch
from rollout_engine import EngineConfig, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.execution import worker
from rollout_engine.kernels.triton import availability
from rollout_engine.model import backends

availability.unsupported_reason = lambda device: None
for call in (
    lambda: backends.device_of(EngineConfig(model="none", device="cuda")),
    lambda: backends.arithmetic_of(torch.device("cuda")),
):
    try:
        call()
    except ConfigError as problem:
        print(problem)
print(backends.device_of(EngineConfig(model="none")).backend.__name__)
"""


@pytest.mark.slow
def test_without_triton_everything_is_imported_and_only_cuda_is_refused():
    run = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    engine, trainer, cpu = run.stdout.splitlines()
    assert "device='cuda' is not possible" in engine and "triton" in engine
    assert "A model on cuda cannot be exact" in trainer and "triton" in trainer
    assert cpu == "CpuBackend"
