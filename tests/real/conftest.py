"""The real model, and trainers of it. Without the package that has it, all tests here are skipped."""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine import testing
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.locations import find_directory
from rollout_engine.model.loading.checkpoint import read_entries


@pytest.fixture(scope="session")
def path():
    pytest.importorskip("gguf")
    try:
        return testing.real_checkpoint()
    except ConfigError as problem:
        pytest.skip(str(problem))


@pytest.fixture
def load(path):
    """load(dtype) -> the plain Hugging Face model, its weights rounded once from the file's float32."""

    def make(dtype):
        directory = find_directory(str(path), weights=True)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
        found = model.load_state_dict({each.name: each.materialize() for each in read_entries(directory)}, strict=False)
        assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys  # tied to the embeddings
        return model.eval()

    yield make
    gc.collect()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param
