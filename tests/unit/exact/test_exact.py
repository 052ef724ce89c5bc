"""The trainer's side: right values and gradients, any padding, and no silent misuse."""

import copy

import pytest
import torch

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.testing import tiny_model

DENSE = ["llama", "qwen2", "qwen3", "mistral"]
EXPERTS = dict(num_experts=5, num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)


def plain_logprobs(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * (mask[:, 1:] * mask[:, :-1])


ROUND_OFF = [
    *((name, torch.float32, 2e-5, 1e-5) for name in (*DENSE, "qwen3_moe", "mixtral")),
    *((name, torch.bfloat16, 0.3, 0.1) for name in DENSE),  # a rounded router may choose another expert
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("architecture", "dtype", "atol", "grad_error"), ROUND_OFF)
def test_values_and_gradients_are_those_of_eager_attention_and_plain_linears(architecture, dtype, atol, grad_error):
    reference = tiny_model(architecture, dtype=dtype, attn_implementation="eager", **EXPERTS).requires_grad_(True)
    trainer = exact.enable(copy.deepcopy(reference))
    ids = torch.randint(3, 259, (4, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(150) < torch.tensor([150, 90, 10, 2])[:, None]
    weights = torch.randn(4, 149, generator=torch.Generator().manual_seed(1))
    ours, theirs = exact.token_logprobs(trainer, ids, mask), plain_logprobs(reference, ids, mask.long())
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), trainer.named_parameters(), strict=True):
        error = (p.grad.float() - q.grad.float()).norm() / p.grad.float().norm()
        assert error < grad_error, name


def test_padding_may_stand_anywhere():
    trainer = exact.enable(tiny_model("qwen3"))
    ids = torch.randint(3, 259, (1, 30))
    with torch.no_grad():
        plain = exact.token_logprobs(trainer, ids)
        left = exact.token_logprobs(trainer, *_with_padding(ids, [0] * 7 + list(range(7, 37)), 37))
        assert torch.equal(left[:, 7:], plain) and not left[:, :7].any()
        holes = [0, 1, 2, *range(5, 32)]
        spread = exact.token_logprobs(trainer, *_with_padding(ids, holes, 40))
        assert torch.equal(spread[:, [p - 1 for p in holes[1:]]], plain)


def _with_padding(ids, places, length):
    wide, mask = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.bool)
    places = places[-ids.shape[1] :]
    wide[0, places], mask[0, places] = ids[0], True
    return wide, mask


def test_temperature_divides_the_logits():
    trainer = exact.enable(tiny_model("llama"))
    ids = torch.randint(3, 259, (2, 12))
    with torch.no_grad():
        cold = exact.token_logprobs(trainer, ids, temperature=0.5)
        logits = trainer(ids).logits[:, :-1]
        expected = (logits / 0.5).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(cold, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_of_given_logits_are_the_same_bits(temperature):
    trainer = exact.enable(tiny_model("llama"))
    ids = torch.randint(3, 259, (2, 12))
    with torch.no_grad():
        expected = exact.token_logprobs(trainer, ids, temperature=temperature)
        logits = trainer(ids).logits[:, :-1].flatten(0, 1)
        found = exact.logprobs_of(logits, ids[:, 1:].flatten(), temperature=temperature)
    assert torch.equal(found.view(2, 11), expected)


def test_a_left_padded_batch_given_to_the_model_itself_is_refused():
    trainer = exact.enable(tiny_model("llama"))
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="right-padded"):
        trainer(input_ids=torch.tensor([[0, 5, 6]]), attention_mask=mask)


def test_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match="Linear"):
        exact.enable(torch.nn.Linear(2, 2))


def test_state_dict_and_training_survive():
    model = tiny_model("qwen3")
    names = list(model.state_dict())
    exact.enable(exact.enable(model))
    assert list(model.state_dict()) == names
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.randint(3, 259, (2, 16))
    losses = []
    for _ in range(8):
        loss = -exact.token_logprobs(model, ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_a_model_whose_rotary_frequencies_were_rounded_is_refused():
    with pytest.raises(ConfigError, match="inv_freq.*from_pretrained"):
        exact.enable(tiny_model("llama").to(torch.bfloat16))


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_model_with_parts_of_unproven_bits_is_refused(architecture):
    with pytest.raises(ConfigError, match="cannot be exact"):
        exact.enable(tiny_model(architecture))


def test_a_device_that_no_kernel_serves_is_refused_by_name():
    with pytest.raises(ConfigError, match="A model on meta cannot be exact: the device is meta.*Move it to the CPU"):
        exact.enable(tiny_model("llama").to("meta"))


def test_a_model_that_moves_after_it_was_enabled_is_refused():
    trainer = exact.enable(tiny_model("llama")).to("meta")
    for call in (lambda: trainer(torch.tensor([[1, 2]], device="meta")), lambda: exact.enable(trainer)):
        with pytest.raises(ConfigError, match="is on meta but was made exact on cpu"):
            call()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_batch_whose_length_would_change_its_rotary_frequencies_is_refused(kind):
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8) if kind == "longrope" else dict(factor=4.0)
    rope = dict(rope_type=kind, rope_theta=10000.0, original_max_position_embeddings=32, **factors)
    longest = 128 if kind == "longrope" else 32
    trainer = exact.enable(tiny_model("llama", rope_parameters=rope, max_position_embeddings=longest))
    ids = torch.randint(3, 259, (2, 40))
    for wrong in (dict(input_ids=ids), dict(input_ids=ids, position_ids=torch.arange(40).expand(2, 40))):
        with pytest.raises(ValueError, match="has 40 positions.*at most 32"):
            trainer(**wrong)
    trainer(input_ids=ids, position_ids=torch.arange(40).remainder(20).expand(2, 40))  # rows of two sequences each
    padded = (torch.arange(40) < 32).expand(2, 40)
    with torch.no_grad():
        whole, cut = exact.token_logprobs(trainer, ids, padded), exact.token_logprobs(trainer, ids[:, :32])
    assert torch.equal(whole[:, :31], cut)


def test_ids_may_be_of_any_integer_dtype_and_padding_any_number():
    trainer = exact.enable(tiny_model("llama"))
    ids, mask = torch.randint(3, 259, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    with torch.no_grad():
        expected = exact.token_logprobs(trainer, ids, mask)
        for dtype in (torch.int32, torch.int16):
            assert torch.equal(exact.token_logprobs(trainer, ids.to(dtype), mask.float()), expected)
        assert torch.equal(exact.token_logprobs(trainer, ids.masked_fill(~mask, -100), mask.long()), expected)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.tensor([[5, 259]]), None, r"input_ids should be in \[0, 259\).*input_ids\[0, 1\] is 259"),
        (torch.tensor([[5, -100]]), None, r"input_ids\[0, 1\] is -100"),
        (torch.tensor([[5.0, 6.0]]), None, "input_ids should be a tensor of token ids .*torch.float32"),
        (torch.tensor([5, 6]), None, r"input_ids should be .*\[B, T\]"),
        ([[5, 6]], None, "input_ids should be .*is a list"),
        (torch.tensor([[5, 6]]), torch.ones(1, 3), r"attention_mask should be a tensor \[1, 2\]"),
        (torch.tensor([[5, 6]]), torch.tensor([[0.0, -torch.inf]]), "attention_mask should hold ones.*holds -inf"),
    ],
)
def test_a_batch_that_cannot_be_read_is_refused_by_name(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        exact.token_logprobs(exact.enable(tiny_model("llama")), ids, mask)
