"""Entropies of rows of logits: exact to the last bit of a float32, whatever stands next to a row, with gradients."""

import math

import numpy as np
import pytest
import torch

from rollout_engine.kernels.entropy import row_figures, token_entropies
from rollout_engine.kernels.token_logprobs import row_temperatures

pytestmark = pytest.mark.usefixtures("side")
KINDS = ["normal", "flat", "peaked", "sharp", "ties", "holes"]


def rows_of(kind, n=12, vocab_size=1000, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab_size, generator=draw) * {"flat": 0.01, "normal": 4.0}.get(kind, 2.0) + 17.3
    if kind in ("peaked", "sharp"):
        logits[torch.arange(n), torch.arange(n) * 31 % vocab_size] += 12 if kind == "peaked" else 40
    if kind == "ties":
        logits = logits.round()
    if kind == "holes":
        logits[torch.rand(n, vocab_size, generator=draw) < 0.9] = -torch.inf
    return logits.to(dtype)


def reference(logits, temperature=1.0):
    """Entropies float64 [n], computed with 64 bits of mantissa; the temperature is the float32 that rows have."""
    scaled = logits.double().numpy().astype(np.longdouble) / np.longdouble(np.float32(temperature))
    scaled -= scaled.max(-1, keepdims=True)
    weights = np.exp(scaled)
    rest = np.where(scaled == 0, 0, weights).sum(-1)
    ties = (scaled == 0).sum(-1)
    terms = np.where(weights > 0, weights * np.where(weights > 0, scaled, 0), 0).sum(-1)
    return np.log(ties.astype(np.longdouble)) + np.log1p(rest / ties) - terms / (ties + rest)


def ulps(found, expected):
    expected = expected.astype(np.float64)
    return np.abs(found.double().numpy() - expected) / np.spacing(expected.astype(np.float32)).astype(np.float64)


@pytest.mark.quick(52)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.05, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_entropies_are_the_exact_ones_rounded_once(kind, dtype, temperature):
    logits = rows_of(kind, dtype=dtype)
    found = token_entropies(logits, temperature)
    assert found.dtype == torch.float32 and bool((found >= 0).all())
    assert ulps(found, reference(logits, temperature)).max() <= 0.51


@pytest.mark.parametrize("gap", [1e-3, 1.0, 15.0, 30.0, 60.0, 87.5, 100.0, 104.0, 200.0])
def test_a_row_that_is_nearly_certain_keeps_its_digits(gap):
    logits = torch.tensor([[-gap, 0.0, -torch.inf]])
    gap = -float(logits[0, 0])
    weight = math.exp(-gap)
    expected = np.array([math.log1p(weight) + gap * weight / (1 + weight)])
    assert ulps(token_entropies(logits), expected).max() <= 0.51


def test_certain_and_broken_rows():
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, 3.0, -inf], [2.0, 2.0, -inf], [0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf]])
    found = token_entropies(logits, 0.5)
    assert found[0] == 0.0 and found[1] == np.float32(math.log(2))
    assert found[2:].isnan().all()
    assert token_entropies(torch.full((1, 7), 1e30)).item() == np.float32(math.log(7))
    assert token_entropies(torch.tensor([[3e38, -3e38]]), 1e-45).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_nothing_but_itself(dtype):
    for vocab_size in (1, 7, 16, 255, 256, 257, 1000):
        logits = rows_of("normal", n=9, vocab_size=vocab_size, dtype=dtype)
        temperatures = row_temperatures(torch.linspace(0.3, 2.0, 9), logits)
        together = row_figures(logits, torch.arange(9), temperatures)
        for row in range(9):
            alone = row_figures(logits[row : row + 1].clone(), torch.tensor([0]), temperatures[row : row + 1])
            assert torch.equal(alone[0], together[row])
        some = torch.tensor([8, 2, 2, 5])
        assert torch.equal(row_figures(logits, some, temperatures[some]), together[some])
        wide = torch.zeros(9, vocab_size + 5, dtype=dtype)
        wide[:, :vocab_size] = logits
        assert torch.equal(row_figures(wide[:, :vocab_size], torch.arange(9), temperatures), together)
    assert row_figures(logits, torch.empty(0, dtype=torch.int64), temperatures[:0]).shape == (0, 3)


def test_bfloat16_logits_have_the_bits_of_the_same_values_in_float32():
    logits = rows_of("normal", dtype=torch.bfloat16)
    assert torch.equal(token_entropies(logits, 0.7), token_entropies(logits.float(), 0.7))


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "holes"])
def test_gradients_are_those_of_float64(kind, temperature):
    logits = rows_of(kind, n=5, vocab_size=300).requires_grad_()
    weights = torch.linspace(-1, 2, 5)
    (token_entropies(logits, temperature) * weights).sum().backward()
    wide = logits.detach().double().requires_grad_()
    logprobs = (wide / float(np.float32(temperature))).log_softmax(-1)
    terms = logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    (-terms.sum(-1) * weights).sum().backward()
    expected = wide.grad.nan_to_num(0.0)
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_gradients_have_the_dtype_of_the_logits():
    logits = rows_of("normal", dtype=torch.bfloat16).requires_grad_()
    token_entropies(logits).sum().backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.any()


def test_wrong_arguments_are_named():
    logits = rows_of("normal", n=2)
    for given, temperature, said in [
        (logits[0], 1.0, "logits should be a tensor of floats"),
        (logits.long(), 1.0, "logits should be a tensor of floats"),
        (logits, -1.0, "temperature should be >= 0"),
        (logits, torch.ones(3), "temperature should be a number, or a tensor"),
    ]:
        with pytest.raises(ValueError, match=said):
            token_entropies(given, temperature)
