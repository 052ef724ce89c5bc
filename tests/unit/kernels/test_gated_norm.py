"""RMSNorm with a gate: the formulas and roundings of transformers, gradients, and the same bits for a row anywhere."""

import pytest
import torch
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from rollout_engine.kernels.norm import gated_rms_norm

pytestmark = pytest.mark.usefixtures("side")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZE, GROUP = 96, 32
RULES = {
    "bamba": dict(group_size=GROUP, gate_first=True),
    "falcon, gate first": dict(group_size=GROUP, gate_first=True, rounds_norm=False),
    "falcon, gate last": dict(group_size=GROUP, gate_first=False, rounds_norm=False),
    "qwen": dict(group_size=SIZE, gate_first=False),
    "kimi": dict(group_size=SIZE, gate_first=False, activation="sigmoid", rounds_norm=False),
}
MODULES = {
    "bamba": lambda: BambaRMSNormGated(SIZE, GROUP, 1e-5),
    "falcon, gate first": lambda: FalconH1RMSNormGated(SIZE, 1e-5, SIZE // GROUP, norm_before_gate=False),
    "falcon, gate last": lambda: FalconH1RMSNormGated(SIZE, 1e-5, SIZE // GROUP, norm_before_gate=True),
    "qwen": lambda: Qwen3NextRMSNormGated(SIZE, 1e-5),
    "kimi": lambda: KimiLinearRMSNormGated(SIZE, 1e-5),
}
ALL = pytest.mark.parametrize("name", RULES)


def draw(name, dtype, *shape):
    module = MODULES[name]().to(dtype)
    module.weight.data.copy_(torch.randn(SIZE))
    return module, (torch.randn(*shape, SIZE) * 3).to(dtype), torch.randn(*shape, SIZE).to(dtype)


@ALL
@DTYPES
def test_it_is_the_norm_of_transformers(name, dtype):
    module, x, gate = draw(name, dtype, 4, 9)
    got, expected = gated_rms_norm(x, gate, module.weight.detach(), 1e-5, **RULES[name]), module(x, gate)
    assert got.dtype is dtype and got.is_contiguous()
    if dtype == torch.bfloat16:  # the same rounding points: only a sum in another order may move a value
        assert (got == expected).float().mean() > 0.98
    torch.testing.assert_close(got, expected, rtol=8 * torch.finfo(dtype).eps, atol=1e-30)


@ALL
@DTYPES
def test_a_row_has_the_same_bits_in_any_batch_and_layout(thread_count, name, dtype):
    module, x, gate = draw(name, dtype, 400)
    weight, rule = module.weight.detach(), RULES[name]
    expected = gated_rms_norm(x, gate, weight, 1e-5, **rule)
    wide = torch.cat((x, gate), -1)
    for threads in (1, 2):
        thread_count(threads)
        for rows in (slice(0, 1), slice(3, 300), slice(None)):
            assert torch.equal(gated_rms_norm(x[rows], gate[rows], weight, 1e-5, **rule), expected[rows])
            sliced = gated_rms_norm(wide[rows, :SIZE], wide[rows, SIZE:], weight, 1e-5, **rule)
            assert torch.equal(sliced, expected[rows])
    by_head = [each.view(20, 20, SIZE).transpose(0, 1) for each in (x, gate)]
    turned = gated_rms_norm(*by_head, weight, 1e-5, **rule)
    assert torch.equal(turned.transpose(0, 1).reshape(400, SIZE), expected)
    assert torch.equal(gated_rms_norm(by_head[0].contiguous(), by_head[1], weight, 1e-5, **rule), turned)


@ALL
def test_gates_and_weights_have_dtypes_of_their_own(name):
    module, x, gate = draw(name, torch.bfloat16, 5)
    weight, rule = module.weight.detach(), RULES[name]
    wanted = gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-5, **rule)
    assert torch.equal(gated_rms_norm(x.float(), gate, weight, 1e-5, **rule), wanted)
    narrow = gated_rms_norm(x, gate, weight, 1e-5, **rule)
    assert torch.equal(gated_rms_norm(x, gate.float(), weight.float(), 1e-5, **rule), narrow)


@ALL
def test_gradients_are_those_of_float64(name):
    module, x, gate = draw(name, torch.float32, 7, 3)
    leaves = [each.detach().requires_grad_() for each in (x, gate, module.weight)]
    grad = torch.randn(7, 3, SIZE)
    found = torch.autograd.grad(gated_rms_norm(*leaves, 1e-5, **RULES[name]), leaves, grad)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    rule, function = RULES[name], torch.sigmoid if name == "kimi" else torch.nn.functional.silu
    value = wide[0] * function(wide[1]) if rule["gate_first"] else wide[0]
    groups = value.unflatten(-1, (-1, rule["group_size"]))
    normal = (groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * wide[2]
    wanted = torch.autograd.grad(normal if rule["gate_first"] else normal * function(wide[1]), wide, grad.double())
    for mine, right in zip(found, wanted, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()
    (alone,) = torch.autograd.grad(gated_rms_norm(x, leaves[1], leaves[2].detach(), 1e-5, **rule), leaves[1], grad)
    assert torch.equal(alone, found[1])


@ALL
def test_gradients_have_the_dtypes_of_their_inputs(name):
    module, x, gate = draw(name, torch.bfloat16, 6)
    leaves = [each.detach().requires_grad_() for each in (x, gate, module.weight)]
    wide = [each.detach().float().requires_grad_() for each in leaves]
    grad = torch.randn(6, SIZE).bfloat16()
    found = torch.autograd.grad(gated_rms_norm(*leaves, 1e-5, **RULES[name]), leaves, grad)
    wanted = torch.autograd.grad(gated_rms_norm(*wide, 1e-5, **RULES[name]), wide, grad.float())
    for mine, right in zip(found, wanted, strict=True):
        assert torch.equal(mine, right.bfloat16())


def test_what_does_not_fit_is_refused():
    x, weight = torch.randn(3, 12), torch.randn(12)
    wrong = [
        ("gate should be", (x[:2], weight, 12, "silu")),
        ("weight should be", (x, weight[:6], 12, "silu")),
        ("group_size should divide 12", (x, weight, 5, "silu")),
        ("group_size should divide 12", (x, weight, 0, "silu")),
        ('should be "silu" or "sigmoid"', (x, weight, 12, "gelu")),
    ]
    for message, (gate, given, group_size, activation) in wrong:
        with pytest.raises(ValueError, match=message):
            gated_rms_norm(x, gate, given, 1e-5, group_size=group_size, gate_first=True, activation=activation)


def test_no_rows_give_no_rows():
    x, weight = torch.empty(0, 12), torch.ones(12)
    assert gated_rms_norm(x, x, weight, 1e-6, group_size=4, gate_first=False).shape == (0, 12)
