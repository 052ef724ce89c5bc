"""The size of a KV pool, and the memory that bounds it: the host's, or the device's that holds the pool."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from rollout_engine import ConfigError, EngineConfig
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.kv_size import size_pool

HOST, DEVICE = 1000, 5000
BLOCK_BYTES = 64
"""One layer of one head of 1 + 1 channels, 16 tokens, bfloat16."""


class OneLayer:
    geometry = (SimpleNamespace(num_kv_heads=1, head_dim_k=1, head_dim_v=1),)
    dtype = torch.bfloat16
    max_model_len = 16
    module = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))]))


@pytest.fixture(autouse=True)
def memories(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=HOST, available=HOST))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (DEVICE // 2, DEVICE))


def on_device(**options):
    config = EngineConfig(model="model", block_size=16, **options)
    return CudaBackend._num_blocks(SimpleNamespace(_config=config, _loaded=OneLayer), 16)


@pytest.mark.parametrize("options", [{"num_kv_blocks": DEVICE // BLOCK_BYTES}, {"kv_cache_bytes": DEVICE}])
def test_a_pool_of_a_device_may_be_larger_than_the_hosts_memory(options):
    assert on_device(**options) == DEVICE // BLOCK_BYTES
    with pytest.raises(ConfigError, match=f"this machine has {HOST} in all"):
        size_pool(EngineConfig(model="model", block_size=16, **options), OneLayer)


def test_a_pool_larger_than_its_device_is_refused():
    with pytest.raises(ConfigError, match=f"kv_cache_bytes=5001 asks for 5001 bytes .* this device has {DEVICE}"):
        on_device(kv_cache_bytes=DEVICE + 1)
