"""The KV pool on a device."""

import torch

from rollout_engine.kernels.triton.layout import KVLayer


def test_one_head_of_one_block_is_one_contiguous_run():
    layer = KVLayer.zeros(5, 3, 16, 24, 8, dtype=torch.bfloat16, device="cpu")
    assert layer.keys[2, 1].is_contiguous() and layer.values[2, 1].is_contiguous()
    assert (layer.num_kv_heads, layer.block_size) == (3, 16)
    assert layer.keys.shape[-1] == 24 and layer.values.shape[-1] == 8


def test_nothing_in_it_can_poison_a_sum():
    layer = KVLayer.zeros(2, 1, 16, 16, 16, dtype=torch.float32, device="cpu")
    assert not layer.keys.any() and not layer.values.any()
