"""A module cut over ranks computes the bits of the whole one, and each rank holds its part alone."""

import pytest
import torch

from rollout_engine.kernels.cpu import turns
from rollout_engine.model.ranks.share import Share, share_of
from rollout_engine.testing import tiny_checkpoint
from tests.unit.model.ranked import Partner, backend_of, logits_of

pytestmark = [
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.usefixtures("own_products"),
]
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "gpt_neox": ("gpt_neox", {}),
    "one key head": ("qwen3", dict(num_key_value_heads=1)),
    "odd sizes": ("llama", dict(hidden_size=56, intermediate_size=75, head_dim=18, vocab_size=301)),
    "tied": ("qwen3", dict(tie_word_embeddings=True)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
}

FAST = ("qwen3", "mixtral")


@pytest.fixture(scope="module")
def partner():
    partner = Partner()
    yield partner
    partner.end()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS if kind not in FAST)]
)
def test_logits_have_the_bits_of_one_rank(tmp_path, partner, kind, dtype):
    architecture, overrides = MODELS[kind]
    path = tiny_checkpoint(tmp_path, architecture, **overrides)
    whole = logits_of(backend_of(path, dtype=dtype))
    backend = backend_of(path, partner.begin(path, dtype=dtype), dtype=dtype)
    assert all(map(torch.equal, logits_of(backend), whole))
    assert ("decoder compiled" in backend.choices) == (kind not in ("mixtral", "gpt_neox"))


def test_shares_hold_every_row_once_at_panels_where_there_are_enough():
    for whole, ranks in ((7, 2), (64, 2), (75, 2), (301, 4), (151936, 3)):
        shares = [share_of(whole, rank, ranks) for rank in range(ranks)]
        assert [s.first for s in shares] == [0, *(s.stop for s in shares[:-1])] and shares[-1].stop == whole
        assert whole < 32 * ranks or all(s.first % 32 == 0 for s in shares)
    with pytest.raises(ValueError, match="3 rows cannot be divided among 4 ranks"):
        share_of(3, 0, 4)
    assert Share(1, 3, 4).times(8) == Share(8, 24, 32)
