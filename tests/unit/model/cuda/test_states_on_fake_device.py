"""A whole engine of a hybrid on the fake device: the same results in every order, no fault, and no wait in a step."""

import pytest
import torch

from rollout_engine import LLM
from rollout_engine.execution import worker
from rollout_engine.model import backends
from rollout_engine.model.cuda import backend
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.testing.architectures import HYBRID_SIZES
from rollout_engine.testing.models import tiny_checkpoint
from tests.fake_device.calls import CUDA
from tests.fake_device.device import FakeDevice
from tests.unit.model.cuda.conftest import OPTIONS
from tests.unit.model.cuda.test_engine_on_fake_device import DRAWN, Waits, assert_alike, run

GUARDS_MEMORY = True
"""Harsh memory would be other memory to the fake device: `harsh_if_asked` leaves these tests out."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels have to run in Triton's interpreter"),
]
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TURNS = [[7, 8, 9], list(range(40, 57))]


def test_a_step_waits_for_nothing_and_finds_the_same_in_every_order(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "device_of", lambda config: backends.Device(CUDA, CudaBackend))
    monkeypatch.setattr(backend, "runs_fused", lambda *_, **__: True)  # modules turn calls of the fake device off
    path = tiny_checkpoint(tmp_path, "qwen3_5_text", **HYBRID_SIZES["qwen3_5_text"] | SMALL)
    waits, found, device = Waits(), [], FakeDevice(seed=3)
    with device:
        llm = LLM(str(path), **(OPTIONS | {"device": "cuda", "max_num_seqs": 3}))
        device.finish()
        device.faults.clear()
        for order in ("lazy", "random"):
            with waits.noted(device, llm, monkeypatch):
                device.timeline.order = order
                llm.reset_prefix_cache()
                found.append(run(llm, DRAWN, TURNS))
                run(llm, DRAWN, [TURNS[1] + [5]])
        device.finish()
        llm.shutdown()
    assert_alike(*found)
    assert device.faults == [] and waits.forbidden == waits.allowed == []
