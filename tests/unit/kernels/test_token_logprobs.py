import random

import numpy as np
import pytest
import torch

from rollout_engine.kernels.token_logprobs import token_logprobs


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _case(n, vocab_size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab_size, generator=generator) * 5).to(dtype)
    token_ids = torch.randint(0, vocab_size, (n,), generator=generator)
    return logits, token_ids, torch.rand(n, generator=generator) * 2 + 0.2


def _reference(logits, token_ids, temperature):
    rows = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    return rows.gather(-1, token_ids[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 259, 4096])
def test_equals_log_softmax_in_float64(dtype, vocab_size):
    logits, ids, temperature = _case(40, vocab_size, dtype, seed=1)
    torch.testing.assert_close(
        token_logprobs(logits, ids, temperature).double(), _reference(logits, ids, temperature), rtol=3e-7, atol=2e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [259, 4096, 6001])
def test_a_row_has_the_same_bits_in_any_batch_place_and_thread_count(dtype, vocab_size):
    logits, ids, temperature = _case(300, vocab_size, dtype, seed=2)
    expected = token_logprobs(logits, ids, temperature)
    chooser = random.Random(3)
    for n in [1, 2, 3, 299, *(chooser.randint(1, 300) for _ in range(30))]:
        torch.set_num_threads(chooser.choice([1, 2]))
        rows = torch.tensor(chooser.sample(range(300), n))
        assert torch.equal(token_logprobs(logits[rows], ids[rows], temperature[rows]), expected[rows])


def test_large_vocabulary_rows_have_the_same_bits_alone():
    logits, ids, temperature = _case(5, 151_936, torch.bfloat16, seed=4)
    together = token_logprobs(logits, ids, temperature)
    torch.set_num_threads(1)
    alone = [token_logprobs(logits[i : i + 1], ids[i : i + 1], temperature[i : i + 1]) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))
    torch.testing.assert_close(together.double(), _reference(logits, ids, temperature), rtol=3e-7, atol=2e-6)


def test_a_strided_view_of_the_logits_gives_the_same_bits():
    logits, ids, temperature = _case(60, 300, torch.float32, seed=5)
    wide = torch.zeros(60, 512)
    wide[:, 7:307] = logits
    assert torch.equal(token_logprobs(wide[:, 7:307], ids, temperature), token_logprobs(logits, ids, temperature))


def test_a_number_as_temperature_equals_a_column_of_it():
    logits, ids, _ = _case(9, 300, torch.float32, seed=6)
    assert torch.equal(token_logprobs(logits, ids, 0.7), token_logprobs(logits, ids, torch.full((9,), 0.7)))
    assert torch.equal(token_logprobs(logits, ids, 0), token_logprobs(logits, ids))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e300])
def test_extreme_temperatures_stay_defined(temperature):
    logits = torch.tensor([[3.0, 5.0, 5.0, -torch.inf]]).repeat(4, 1)
    values = token_logprobs(logits, torch.arange(4), temperature).exp()
    expected = [0, 0.5, 0.5, 0] if temperature < 1 else [1 / 3, 1 / 3, 1 / 3, 0]
    torch.testing.assert_close(values, torch.tensor(expected))


@pytest.mark.parametrize("row", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
def test_a_broken_row_gives_nan_and_leaves_the_others_alone(row):
    logits = torch.tensor([[1.0, 2.0], row, [3.0, -1.0]])
    values = token_logprobs(logits, torch.zeros(3, dtype=torch.int64))
    assert values.isnan().tolist() == [False, True, False]


def test_no_rows_give_no_values():
    assert token_logprobs(torch.empty(0, 50), torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_gradients_equal_those_of_log_softmax(dtype, tolerance):
    logits, ids, temperature = _case(70, 4096 * 3 + 5, dtype, seed=7)
    weights = torch.randn(70, generator=torch.Generator().manual_seed(8))
    logits.requires_grad_()
    (token_logprobs(logits, ids, temperature) * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    (_reference(exact, ids, temperature) * weights).sum().backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance * 1e-2)


def test_gradient_of_a_row_has_the_same_bits_alone():
    logits, ids, temperature = _case(20, 259, torch.float32, seed=9)
    together, alone = logits.clone().requires_grad_(), logits[7:8].clone().requires_grad_()
    token_logprobs(together, ids, temperature).sum().backward()
    token_logprobs(alone, ids[7:8], temperature[7:8]).sum().backward()
    assert torch.equal(together.grad[7:8], alone.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_integer_dtype_will_do(side, dtype):
    logits, ids = torch.randn(3, 40), torch.tensor([0, 39, 7])
    assert torch.equal(token_logprobs(logits, ids.to(dtype)), token_logprobs(logits, ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(token_ids=torch.tensor([0, 40, 1])), r"token_ids should be in \[0, 40\).*token_ids\[1\] is 40"),
        (dict(token_ids=torch.tensor([0, 1, -100])), r"token_ids\[2\] is -100"),
        (dict(token_ids=torch.zeros(3)), "token_ids should be a tensor of integers.*is torch.float32"),
        (dict(token_ids=torch.zeros(2, dtype=torch.int64)), r"one for each row of logits, and is torch.int64 \[2\]"),
        (dict(logits=torch.zeros(3, 4, 40)), r"logits should be a tensor of floats \[N, V\]"),
        (dict(temperature=-1.0), "temperature should be >= 0, and its lowest is -1.0"),
        (dict(temperature=torch.tensor([1.0, torch.nan, 1.0])), "temperature should be >= 0"),
        (dict(temperature="hot"), r"temperature should be a number, or a tensor \[3\], and is a str"),
        (dict(temperature=torch.ones(2)), r"temperature should be a number, or a tensor \[3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(side, changes, message):
    right = dict(logits=torch.randn(3, 40), token_ids=torch.tensor([0, 1, 2]), temperature=1.0)
    with pytest.raises(ValueError, match=message):
        token_logprobs(**right | changes)


def test_a_temperature_may_be_any_real_number():
    logits, ids = torch.randn(3, 40), torch.tensor([0, 39, 7])
    for temperature in (2, np.float32(2), np.int64(2), torch.tensor(2.0), torch.full((3,), 2.0)):
        assert torch.equal(token_logprobs(logits, ids, temperature), token_logprobs(logits, ids, 2.0))
