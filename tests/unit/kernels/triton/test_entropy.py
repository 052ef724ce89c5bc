"""Entropies in Triton against their twin."""

import pytest
import torch

from rollout_engine.kernels import entropy as twin
from rollout_engine.kernels.token_logprobs import row_temperatures
from rollout_engine.kernels.triton.entropy import row_figures

pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:All-NaN:RuntimeWarning",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_entropies_are_the_twins(vocab_size, dtype, device):
    logits = (torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    logits[1, 1:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 2] = torch.nan
    logits[4, :3] = 9.0
    rows, temperatures = torch.tensor([0, 1, 2, 3, 4, 6, 6]), row_temperatures(torch.linspace(0.2, 2, 7), logits)
    expected = twin.row_figures(logits, rows, temperatures[rows])
    found = row_figures(logits.to(device), rows.to(device), temperatures[rows].to(device)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-300, equal_nan=True)
    sound = expected[:, 2].isfinite()
    assert torch.equal(found[sound, 2].float(), expected[sound, 2].float())
    assert sound.tolist() == [True, True, False, False, True, True, True]


def test_a_row_depends_on_nothing_but_itself(device):
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(1)).to(device)
    temperatures = torch.linspace(0.5, 1.5, 6, device=device)
    together = row_figures(logits, torch.arange(6, device=device), temperatures)
    for row in range(6):
        alone = row_figures(logits, torch.tensor([row], device=device), temperatures[row : row + 1])
        assert torch.equal(alone[0], together[row])
