"""Engines whose KV may differ in a bit have namespaces of their own."""

from types import SimpleNamespace

import torch
from transformers import PretrainedConfig

from rollout_engine import EngineConfig
from rollout_engine.execution import kv_layout, made_with

TRANSFER = SimpleNamespace(
    block_bytes=4, state_bytes=0, describe_dtypes=lambda: "float32", describe_shapes=lambda: "1:torch.float32"
)


def namespace(*, deterministic=True, device="cpu", **model):
    config, backend = EngineConfig(model="m"), SimpleNamespace(is_deterministic=deterministic)
    found = kv_layout.describe_layout(config, PretrainedConfig(**model), backend, TRANSFER, torch.device(device))
    return found.namespace


def test_engines_with_other_kernels_share_no_blocks(monkeypatch):
    ours = namespace()
    assert ours == namespace(_name_or_path="elsewhere") != namespace(deterministic=False)
    assert ours != namespace(some_size=3)
    for other in ("none", "0123"):  # no compiler there, or another one
        monkeypatch.setattr(kv_layout, "describe_kernels", lambda other=other: other)
        assert namespace() != ours


def test_engines_on_devices_with_other_versions_of_triton_share_no_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    found = set()
    for version in ("3.5.0", "3.6.0", "3.6.0"):
        monkeypatch.setattr(made_with, "version", lambda package, version=version: version)
        found.add(namespace(device="cuda"))
    assert len(found) == 2
