"""Modules compute the logits of many rows in pieces: to the bits of one forward, and never more rows than a piece."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.model.cpu.deterministic import make_deterministic
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.model.sampling import logit_rows, module_logits

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here")
SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
HEADS = {
    "gemma2": dict(intermediate_size=48, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0),
    "granite": dict(intermediate_size=48, num_key_value_heads=2, logits_scaling=7.0),
    "cohere": dict(intermediate_size=48, num_key_value_heads=2, logit_scale=0.3),
    "olmo2": dict(intermediate_size=48, num_key_value_heads=2),
    "mixtral": dict(intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": dict(intermediate_size=48),
}
"""Architectures that run as modules, whose logits are the product, or are scaled or capped after it."""
PIECE_ROWS = 3
CHUNKS = [SequenceChunk([5, 6, 7, 8, 9], 0, [0]), SequenceChunk([9, 8, 7, 30, 31, 32], 0, [1])]
ROWS = [0, 10, 3, 4, 5, 7, 8]
TAKEN = [slice(0, 3), slice(3, 6), slice(6, 7), torch.tensor([6, 6, 0]), torch.tensor([1])]


def paged(model_type, wrap=lambda module: module, **fields):
    """A model as an engine has it, in a deterministic engine."""
    torch.manual_seed(0)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(model_type, **SIZES, **special, **fields)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.2)
    geometry = probe_geometry(module)
    fuse_projections(module)
    assert make_deterministic(module, geometry) is None
    return CpuModel(wrap(module), geometry, num_blocks=4, block_size=16)


def count_rows(module):
    """Rows of each call of the head."""
    counts = []
    module.get_output_embeddings().register_forward_hook(
        lambda _, arguments, output: counts.append(output.numel() // output.shape[-1])
    )
    return counts


def taken(model, monkeypatch, piece_rows):
    monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", piece_rows * SIZES["vocab_size"])
    rows = model.forward_rows(CHUNKS, ROWS)
    return [rows.take(some) for some in TAKEN]


@pytest.mark.parametrize("name", HEADS)
def test_pieces_have_the_bits_of_the_whole(name, monkeypatch):
    model = paged(name, **HEADS[name])
    whole = taken(model, monkeypatch, len(ROWS))
    counts = count_rows(model.module)
    assert all(map(torch.equal, whole, taken(model, monkeypatch, PIECE_ROWS)))
    assert max(counts) <= PIECE_ROWS and not module_logits._warned


def test_pieces_follow_the_weights(monkeypatch):
    model = paged("gemma2", **HEADS["gemma2"])
    before = taken(model, monkeypatch, PIECE_ROWS)
    for parameter in model.module.parameters():
        parameter.mul_(1.25)
    after = taken(model, monkeypatch, PIECE_ROWS)
    assert all(map(torch.equal, taken(model, monkeypatch, len(ROWS)), after))
    assert not any(map(torch.equal, before, after))


class Renamed(torch.nn.Module):
    """A causal LM that does not say which of its parts is the base model."""

    def __init__(self, module):
        super().__init__()
        self.inner, self.config = module, module.config

    def forward(self, **arguments):
        return self.inner(**arguments)

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()


class Adding(torch.nn.Module):
    """A causal LM whose logits do not come of its base model's output alone."""

    def __init__(self, module):
        super().__init__()
        self.inner, self.config = module, module.config
        self.base_model = module.base_model

    def forward(self, input_ids, **arguments):
        out = self.inner(input_ids=input_ids, **arguments)
        out.logits = out.logits + input_ids.sum()
        return out

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()


@pytest.mark.parametrize("wrap", [Renamed, Adding])
def test_a_head_that_cannot_be_told_apart_runs_behind_the_layers_again(wrap, monkeypatch, caplog):
    monkeypatch.setattr(module_logits, "_warned", set())
    model = paged("gemma2", wrap, **HEADS["gemma2"])
    whole = taken(model, monkeypatch, len(ROWS))
    counts = count_rows(model.module)
    assert all(map(torch.equal, whole, taken(model, monkeypatch, PIECE_ROWS)))
    assert max(counts) <= PIECE_ROWS
    assert f"{wrap.__name__}: its head cannot be told apart from its layers" in caplog.text


def test_where_the_forward_cannot_run_again_all_rows_are_computed_now(monkeypatch):
    monkeypatch.setattr(module_logits, "_warned", set())
    monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", PIECE_ROWS * SIZES["vocab_size"])
    module = Renamed(paged("gemma2", **HEADS["gemma2"]).module)
    calls = []

    def forward(rows):
        calls.append(len(rows))
        return type("Out", (), {"logits": rows[None, :, None].float()})

    rows = module_logits.module_logits(module, forward, torch.arange(5), SIZES["vocab_size"])
    assert calls == [5] and rows.take(slice(1, 3)).flatten().tolist() == [1.0, 2.0]
