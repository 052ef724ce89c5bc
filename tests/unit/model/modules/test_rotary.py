"""Rotary tables have the bits that the module computes for a batch."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout_engine.model.modules.rotary import RotaryTable, rotary_limit

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "factor": 4.0,
        "original_max_position_embeddings": 700,
    },
}


def rotary(kind: str) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(config(kind))


def config(kind: str) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}
    return LlamaConfig(head_dim=32, max_position_embeddings=2048, rope_parameters=rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROPES)
def test_rows_are_those_that_the_module_computes(kind, dtype):
    table, like = RotaryTable(rotary(kind), rotary_limit(config(kind))), torch.empty(1, 64, dtype=dtype)
    for seed, end in enumerate((5, 600, 690, 1500, 2048, 4000, 70)):
        positions = torch.randint(end, (1 + 37 * seed,), generator=torch.Generator().manual_seed(seed))
        expected = rotary(kind)(like[None], position_ids=positions[None])
        for found, wanted in zip(table.rows(positions, like), expected, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, wanted[0]), (kind, end)


def test_a_position_is_computed_once():
    module, calls = rotary("default"), []
    module.register_forward_hook(lambda _, args, out: calls.append(len(out[0][0])))
    table, like = RotaryTable(module, None), torch.empty(1, 64)
    for end in (10, 1024, 1025, 7, 2000, 9000):
        table.rows(torch.arange(end), like)
    assert calls == [1024, 2048, 16384]


def test_batches_past_the_limit_and_modules_of_others_are_computed_anew():
    class Other(LlamaRotaryEmbedding):
        pass

    for module, limit, expected in ((rotary("dynamic"), 100, [100, 3]), (Other(config("default")), None, [3, 3])):
        calls = []
        module.register_forward_hook(lambda _, args, out, calls=calls: calls.append(len(out[0][0])))
        table, like = RotaryTable(module, limit), torch.empty(1, 64)
        table.rows(torch.tensor([1, 5, 99]), like)
        table.rows(torch.tensor([1, 5, 100]), like)
        assert calls == expected


def test_no_positions_have_no_rows():
    cos, sin = RotaryTable(rotary("default"), None).rows(torch.empty(0, dtype=torch.int64), torch.empty(1, 64))
    assert cos.shape == sin.shape == (0, 32)
