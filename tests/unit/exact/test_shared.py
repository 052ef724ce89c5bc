"""Rows that begin alike are computed together on the trainer, to the bits of rows that are computed apart."""

import copy

import pytest
import torch

from rollout_engine import exact
from rollout_engine.exact import trainer as exact_trainer
from rollout_engine.model.modules.packed_rows import packed_sequences
from rollout_engine.model.modules.shared_rows import SharedRows
from rollout_engine.testing import tiny_model

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "phi3", "qwen3_moe"]
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)
PROMPT_LENGTHS = [70, 5, 130]
NUM_SAMPLES = 3


def batch_of(sequences):
    """(input_ids [B, T], mask [B, T]), padded on the right."""
    length = max(map(len, sequences))
    ids = torch.tensor([list(tokens) + [0] * (length - len(tokens)) for tokens in sequences])
    return ids, torch.tensor([[place < len(tokens) for place in range(length)] for tokens in sequences])


@pytest.fixture(scope="module")
def groups():
    """(input_ids, mask) of three samples for each of three prompts, in no order."""
    draw = torch.Generator().manual_seed(0)
    sequences = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(3, 259, (length,), generator=draw).tolist()
        for num in range(NUM_SAMPLES):
            sequences.append(prompt + torch.randint(3, 259, (1 + 4 * num,), generator=draw).tolist())
    order = torch.randperm(len(sequences), generator=draw).tolist()
    return batch_of([sequences[i] for i in order])


@pytest.fixture
def apart(monkeypatch):
    """Call it to have rows computed apart from then on."""
    return lambda: monkeypatch.setattr(exact_trainer, "shares_prefixes", lambda model: False)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_have_the_bits_of_rows_apart(architecture, dtype, groups, apart):
    trainer = exact.enable(tiny_model(architecture, dtype=dtype, **EXPERTS))
    with torch.no_grad():
        assert exact_trainer.shares_prefixes(trainer)
        together = exact.token_logprobs(trainer, *groups)
        apart()
        assert torch.equal(together, exact.token_logprobs(trainer, *groups))
    assert together.any()


def test_entropies_and_left_padded_rows_have_these_bits_too(groups, apart):
    trainer = exact.enable(tiny_model("qwen3"))
    left = tuple(
        torch.stack([row.roll(int((~real).sum())) for row, real in zip(x, groups[1], strict=True)]) for x in groups
    )
    with torch.no_grad():
        together = [exact.token_logprobs_and_entropies(trainer, *given, temperature=0.7) for given in (groups, left)]
        apart()
        expected = [exact.token_logprobs_and_entropies(trainer, *given, temperature=0.7) for given in (groups, left)]
    for found, wanted in zip(together, expected, strict=True):
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_rows_apart(dtype, groups, apart):
    trainer = exact.enable(tiny_model("qwen3", dtype=dtype)).requires_grad_(True)
    other = copy.deepcopy(trainer)
    weights = torch.randn(groups[0].shape[0], groups[0].shape[1] - 1, generator=torch.Generator().manual_seed(1))
    (exact.token_logprobs(trainer, *groups) * weights).sum().backward()
    apart()
    (exact.token_logprobs(other, *groups) * weights).sum().backward()
    for (name, p), q in zip(trainer.named_parameters(), other.parameters(), strict=True):
        error = (p.grad.float() - q.grad.float()).norm() / q.grad.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), name


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable")
def test_checkpointed_layers_share_as_well(groups):
    plain = exact.enable(tiny_model("llama")).requires_grad_(True)
    checkpointed = copy.deepcopy(plain).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        exact.token_logprobs(model, *groups).mean().backward()
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_prompt_is_computed_once_and_padding_never(groups):
    trainer = exact.enable(tiny_model("llama"))
    exact_trainer.shares_prefixes(trainer)  # its trial is a forward too
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with torch.no_grad():
        exact.token_logprobs(trainer, *groups)
    answers = sum(1 + 4 * num for num in range(NUM_SAMPLES)) * len(PROMPT_LENGTHS)
    assert seen == [sum(PROMPT_LENGTHS) + answers]


def test_a_model_whose_attention_is_not_told_of_positions_computes_rows_apart(groups, monkeypatch):
    trainer = exact.enable(tiny_model("llama"))
    with torch.no_grad():
        expected = exact.token_logprobs(trainer, *groups)
    untold = exact.enable(tiny_model("llama"))
    for layer in untold.model.layers:
        forward = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn, "forward", lambda *a, _forward=forward, position_ids=None, **kw: _forward(*a, **kw)
        )
    with torch.no_grad():
        assert not exact_trainer.shares_prefixes(untold)
        assert torch.equal(exact.token_logprobs(untold, *groups), expected)


def test_a_model_that_mixes_tokens_beside_its_attention_computes_rows_apart():
    trainer = exact.enable(tiny_model("llama"))
    trainer.model.embed_tokens.register_forward_hook(lambda module, args, out: out + out.roll(1, 1))
    assert not exact_trainer.shares_prefixes(trainer)


@pytest.mark.parametrize("seed", range(20))
def test_rows_share_exactly_what_they_begin_with(seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (9,), generator=draw).tolist()
    sequences = [torch.randint(1, 3, (length,), generator=draw).tolist() for length in lengths]
    ids, real = batch_of([*sequences, [1, 1]])
    sequences.append([1, 1])
    rows = SharedRows.of(ids, real)
    prefixes = {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens))}
    assert rows.input_ids.numel() - len(prefixes) <= len(sequences)  # the last token of a row is always its own
    found = [pair.item() for pair in rows.targets[rows.places]]
    assert found == [token for tokens in sequences for token in tokens[1:]]
    packed = packed_sequences(rows.position_ids, *rows.input_ids.shape)
    if packed is not None and packed.tokens is not None:
        whole = rows.input_ids[0][packed.tokens].split(packed.lengths)
        inside = {tuple(part.tolist()) for part in whole}
        assert all(any(part[: len(tokens)] == tuple(tokens) for part in inside) for tokens in sequences)
        assert torch.equal(packed.tokens[packed.places], torch.arange(rows.input_ids.numel()))


def test_positions_that_a_user_gives_must_still_begin_at_0(groups):
    trainer = exact.enable(tiny_model("llama"))
    rows = SharedRows.of(*groups)
    with pytest.raises(ValueError, match="start again at 0"):
        exact.token_logprobs(trainer, rows.input_ids, position_ids=rows.position_ids)
