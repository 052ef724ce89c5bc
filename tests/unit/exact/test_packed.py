"""Packed rows: every sequence is computed as if it stood alone, bit for bit, and what is ambiguous is refused."""

import copy

import pytest
import torch
from transformers import DataCollatorWithFlattening

from rollout_engine import exact
from rollout_engine.testing import tiny_model

LENGTHS = [70, 1, 130, 2, 65, 9]
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "phi3", "qwen3_moe"]
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 259, (1, length), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def trainer():
    return exact.enable(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def packed(sequences):
    """(input_ids [1, T], cu_seqlens, position_ids [1, T])."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    return torch.cat(sequences, 1), edges.int(), positions


def alone(trainer, sequences):
    """Log-probs of every sequence by itself, with a 0 where the next one begins."""
    parts = []
    for ids in sequences:
        parts += [exact.token_logprobs(trainer, ids) if ids.shape[1] > 1 else torch.zeros(1, 0), torch.zeros(1, 1)]
    return torch.cat(parts[:-1], 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_sequences_have_the_bits_of_sequences_alone(architecture, dtype, sequences, packed):
    trainer = exact.enable(tiny_model(architecture, dtype=dtype, **EXPERTS))
    ids, edges, positions = packed
    with torch.no_grad():
        expected = alone(trainer, sequences)
        assert torch.equal(exact.token_logprobs(trainer, ids, cu_seqlens=edges), expected)
        assert torch.equal(exact.token_logprobs(trainer, ids, position_ids=positions), expected)


def test_gradients_are_those_of_sequences_alone(sequences, packed):
    trainer = exact.enable(tiny_model("qwen3")).requires_grad_(True)
    apart = copy.deepcopy(trainer)
    weights = torch.randn(1, sum(LENGTHS) - 1, generator=torch.Generator().manual_seed(1))
    (exact.token_logprobs(trainer, packed[0], cu_seqlens=packed[1]) * weights).sum().backward()
    (alone(apart, sequences) * weights).sum().backward()
    for (name, p), q in zip(trainer.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable")
def test_checkpointed_layers_see_the_same_packing(packed):
    plain = exact.enable(tiny_model("llama")).requires_grad_(True)
    checkpointed = copy.deepcopy(plain).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        exact.token_logprobs(model, packed[0], cu_seqlens=packed[1]).mean().backward()
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_rows_may_be_packed_and_padded(trainer, sequences):
    rows = [[0, 1, 4], [2, 3]]
    length = max(sum(LENGTHS[i] for i in row) for row in rows)
    ids, positions = torch.zeros(2, length, dtype=torch.int64), torch.ones(2, length, dtype=torch.int64)
    mask = torch.zeros(2, length, dtype=torch.int64)
    for row, members in enumerate(rows):
        joined = torch.cat([sequences[i] for i in members], 1)[0]
        ids[row, : len(joined)], mask[row, : len(joined)] = joined, 1
        positions[row, : len(joined)] = torch.cat([torch.arange(LENGTHS[i]) for i in members])
    with torch.no_grad():
        result = exact.token_logprobs(trainer, ids, mask, position_ids=positions)
        for row, members in enumerate(rows):
            expected = alone(trainer, [sequences[i] for i in members])
            assert torch.equal(result[row, : expected.shape[1]], expected[0])
            assert not result[row, expected.shape[1] :].any()


def test_a_flattening_collators_batch_is_read_by_the_model_itself(trainer, sequences, packed):
    features = [{"input_ids": ids[0].tolist()} for ids in sequences]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collator(features)
    del batch["labels"]
    with torch.no_grad():
        logits = trainer(**batch, use_cache=False).logits
        for ids, part in zip(sequences, logits.split(LENGTHS, 1), strict=True):
            assert torch.equal(part, trainer(input_ids=ids, use_cache=False).logits)


def test_positions_that_count_along_whole_rows_are_no_packing(trainer, sequences):
    ids = sequences[2]
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        assert torch.equal(exact.token_logprobs(trainer, ids, position_ids=positions), alone(trainer, [ids]))


def test_a_model_whose_attention_is_not_told_of_positions_is_refused(packed, monkeypatch):
    trainer = exact.enable(tiny_model("llama"))
    for layer in trainer.model.layers:
        forward = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda *a, _forward=forward, position_ids=None, **kw: _forward(*a, **kw)
        )
    with pytest.raises(ValueError, match="does not hand position_ids to attention"):
        exact.token_logprobs(trainer, packed[0], cu_seqlens=packed[1])
    exact.token_logprobs(trainer, packed[0])  # one sequence


WRONG_CALLS = {
    "edges that end too early": (dict(cu_seqlens=torch.tensor([0, 3, 5])), "rise from 0 to 8.*ending at 5"),
    "edges that fall": (dict(cu_seqlens=torch.tensor([0, 5, 3, 8])), "rise from 0 to 8"),
    "an empty sequence": (dict(cu_seqlens=torch.tensor([0, 3, 3, 8])), "by at least 1 a sequence"),
    "lengths, not edges": (dict(cu_seqlens=torch.tensor([3, 5])), "rise from 0 to 8"),
    "edges that are no integers": (dict(cu_seqlens=torch.tensor([0.0, 8.0])), "int32 or int64"),
    "both": (dict(cu_seqlens=torch.tensor([0, 8]), position_ids=torch.arange(8)[None]), "give one"),
    "padding": (dict(cu_seqlens=torch.tensor([0, 8]), attention_mask=torch.tensor([[1] * 7 + [0]])), "1 masked"),
    "another shape": (dict(position_ids=torch.arange(8)), r"\(1, 8\) like input_ids, got \(8,\)"),
    "a jump": (dict(position_ids=torch.tensor([[0, 1, 2, 7, 8, 9, 10, 11]])), r"got 7 at \[0, 3\]"),
    "a late start": (dict(position_ids=torch.arange(8)[None] + 2), r"got 2 at \[0, 0\]"),
    "a restart at 1": (dict(position_ids=torch.tensor([[0, 1, 2, 1, 2, 3, 4, 5]])), r"got 1 at \[0, 3\]"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_what_does_not_say_where_sequences_begin_is_refused(trainer, case):
    arguments, message = WRONG_CALLS[case]
    with pytest.raises(ValueError, match=message):
        exact.token_logprobs(trainer, torch.arange(3, 11)[None], **arguments)


def test_edges_without_their_positions_are_refused_by_the_model(trainer):
    with pytest.raises(ValueError, match="cu_seq_lens_q must come with the position_ids"):
        trainer(input_ids=torch.arange(3, 11)[None], cu_seq_lens_q=torch.tensor([0, 3, 8]), use_cache=False)
