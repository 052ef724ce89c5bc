"""Rotary positions, head norms and the KV write in one pass, against Hugging Face's modules."""

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from rollout_engine.kernels.norm import rms_norm
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.rotary import HeadNorms, Rotary, rotate_and_write

TOKENS, HEADS, KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 5, 6, 3, 16, 4
POSITIONS = [3, 0, 40, 63, 17]
SLOTS = [40, 0, 17, -1, 63]


class _Case:
    def __init__(self, device, dtype, *, size=24, value_size=20, rotated=24, interleaved=False, with_norms=False):
        def random(*shape):
            return torch.randn(*shape, generator=self._generator).to(device, dtype)

        self._generator = torch.Generator().manual_seed(0)
        packed = random(TOKENS, HEADS * size + KV_HEADS * (size + value_size))
        q, k, v = packed.split([HEADS * size, KV_HEADS * size, KV_HEADS * value_size], dim=1)
        self.q, self.k, self.v = (
            q.view(TOKENS, HEADS, size),
            k.view(TOKENS, KV_HEADS, size),
            v.unflatten(1, (KV_HEADS, -1)),
        )
        angles = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(0, rotated, 2) / rotated)
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        self.rotary = Rotary(angles.cos().to(device, dtype), angles.sin().to(device, dtype), interleaved)
        self.norms = HeadNorms(random(size), random(size), 1e-6) if with_norms else None
        shape = NUM_BLOCKS, KV_HEADS, BLOCK_SIZE
        self.layer = KVLayer(random(*shape, size), random(*shape, value_size))
        self.positions, self.slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)

    def run(self, q_out):
        rotate_and_write(
            *(self.q, self.k, self.v, self.positions, self.slots),
            *(self.rotary, self.layer, q_out, self.norms),
        )

    def expected(self):
        """Rotated q and k, by transformers' own function, in the dtype of the model."""
        q, k = self.q, self.k
        if self.norms:
            q = rms_norm(q, self.norms.q_weight, self.norms.epsilon)
            k = rms_norm(k, self.norms.k_weight, self.norms.epsilon)
        cos, sin = self.rotary.cos[self.positions], self.rotary.sin[self.positions]
        rotated = cos.shape[1]
        theirs = modeling_cohere if self.rotary.is_interleaved else modeling_llama
        parts = theirs.apply_rotary_pos_emb(q[..., :rotated], k[..., :rotated], cos, sin, unsqueeze_dim=1)
        return [torch.cat([part, x[..., rotated:]], -1).to(x.dtype) for part, x in zip(parts, (q, k), strict=True)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 40, "rotated": 12, "value_size": 16},
        pytest.param({"with_norms": True}, marks=pytest.mark.slow),
        {"size": 40, "rotated": 12, "with_norms": True},
    ],
    ids=["whole", "partial", "normed", "normed-partial"],
)
def test_queries_turn_and_keys_and_values_reach_their_slots(device, dtype, options):
    case = _Case(device, dtype, **options)
    q, k = case.expected()
    keys, values = case.layer.keys.clone(), case.layer.values.clone()
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            keys[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = k[token]
            values[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = case.v[token]
    q_out = torch.full_like(case.q, torch.nan)
    case.run(q_out)
    exact = {"rtol": 0, "atol": 0}
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps} if case.norms else exact
    torch.testing.assert_close(q_out, q, **tolerance)
    torch.testing.assert_close(case.layer.keys, keys, **tolerance)
    torch.testing.assert_close(case.layer.values, values, **exact)


def test_interleaved_pairs_turn_as_in_cohere(device):
    case = _Case(device, torch.float32, interleaved=True)
    q_out = torch.empty_like(case.q)
    case.run(q_out)
    torch.testing.assert_close(q_out, case.expected()[0], rtol=0, atol=0)


def test_queries_may_turn_in_place(device):
    case = _Case(device, torch.bfloat16)
    expected, k = case.expected()[0], case.k.clone()
    case.run(case.q)
    assert torch.equal(case.q, expected)
    assert torch.equal(case.k, k)


def test_a_token_turns_alike_alone_and_in_company(device):
    case = _Case(device, torch.float32, with_norms=True)
    together = torch.empty_like(case.q)
    case.run(together)
    keys = case.layer.keys.clone()
    for token in range(TOKENS):
        one = slice(token, token + 1)
        alone = torch.empty_like(case.q[one])
        rotate_and_write(
            *(case.q[one], case.k[one], case.v[one], case.positions[one], case.slots[one]),
            *(case.rotary, case.layer, alone, case.norms),
        )
        assert torch.equal(alone, together[one])
    assert torch.equal(case.layer.keys, keys)
