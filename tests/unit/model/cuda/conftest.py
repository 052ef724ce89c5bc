"""Engines on a device: a CUDA device where there is one, else CPU tensors through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from transformers import AutoModelForCausalLM  # noqa: E402

from rollout_engine import LLM, exact  # noqa: E402
from rollout_engine.exact import enabling as exact_enabling  # noqa: E402
from rollout_engine.execution import worker  # noqa: E402
from rollout_engine.model import backends  # noqa: E402
from rollout_engine.model.cuda.backend import CudaBackend  # noqa: E402
from rollout_engine.model.cuda.row_invariance import ARITHMETIC  # noqa: E402
from rollout_engine.testing.models import tiny_checkpoint  # noqa: E402
from tests.unit.kernels.triton.conftest import (  # noqa: E402, F401
    device,
    harsh,
    harsh_if_asked,
    interpreter,
)

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 64,
    "num_kv_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
    "log_stats": False,
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a small checkpoint of it."""
    made = {}

    def get(architecture):
        if architecture not in made:
            made[architecture] = tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return get


@pytest.fixture(scope="module")
def engines():
    """Those made so far, by what was asked for."""
    made = {}
    yield made
    for each in made.values():
        each.shutdown()


@pytest.fixture
def engine_on(monkeypatch, checkpoints, engines, device):  # noqa: F811
    """A function from "cpu" or "device", an architecture and options to an `LLM` there, one for all that ask alike."""

    def get(place, architecture="qwen3", **options):
        key = place, architecture, *options.items()
        if key not in engines:
            where = backends.Device(torch.device(device), CudaBackend)
            chosen = (lambda config: where) if place == "device" else backends.device_of
            options = {"async_scheduling": place == "device"} | options
            with monkeypatch.context() as patch:
                patch.setattr(worker, "device_of", chosen)
                engines[key] = LLM(str(checkpoints(architecture)), **(OPTIONS | options))
        return engines[key]

    return get


@pytest.fixture
def enable(monkeypatch, device):  # noqa: F811
    """`exact.enable` as on a CUDA device."""

    def on_device(model):
        with monkeypatch.context() as patch:
            patch.setattr(exact_enabling, "arithmetic_of", lambda _: ARITHMETIC)
            return exact.enable(model.to(device))

    return on_device


@pytest.fixture
def trainer_of(enable, checkpoints):
    """A function from an architecture and a dtype to the exact trainer of its checkpoint."""

    def get(architecture, dtype):
        path = str(checkpoints(architecture))
        return enable(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)))

    return get
