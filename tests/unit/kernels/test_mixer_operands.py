"""Operands of mixers in the decoder's one call are checked before C++ reads them."""

import pytest
import torch

from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.kernels.cpu.delta_net import GatedNorm
from rollout_engine.kernels.cpu.mamba import Mamba, MambaColumns, MambaOperand
from rollout_engine.kernels.cpu.short_convolution import ShortConvolution, ShortConvolutionOperand

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here")

CONVOLUTION = ShortConvolution(0, 8, 4, torch.zeros(4, 3), None, torch.zeros(5, 2, 4))
COLUMNS = MambaColumns([(0, 12, 16)], 0, [28, 29, 30])
MAMBA = Mamba(
    columns=COLUMNS,
    conv_weight=torch.zeros(16, 4),
    conv_bias=torch.zeros(16),
    a_log=torch.zeros(3),
    dt_bias=torch.zeros(3),
    skip=torch.zeros(3),
    limits=(0.0, float("inf")),
    norm=GatedNorm(torch.ones(12), 1e-6, is_rounded=True, is_gate_first=True),
    norm_size=12,
    num_groups=1,
    tails=torch.zeros(5, 3, 16),
    states=torch.zeros(5, 3, 2, 4),
)


def test_sizes_and_columns_that_fit_are_taken():
    assert ShortConvolutionOperand(CONVOLUTION, torch.float32, 12).num_slots == 5
    assert MambaOperand(MAMBA, torch.float32, 31).num_slots == 5
    assert (CONVOLUTION.attended, MAMBA.attended) == (4, 12)


@pytest.mark.parametrize(
    ("changes", "num_columns", "match"),
    [
        (dict(gates=9), 13, "three blocks of 4 among 13"),
        ({}, 11, "three blocks of 4 among 11"),
        (dict(values=-1), 12, "three blocks"),
        (dict(weight=torch.zeros(4, 3).bfloat16()), 12, "weight should be"),
        (dict(bias=torch.zeros(5)), 12, "bias should be"),
        (dict(tails=torch.zeros(5, 3, 4)), 12, "tails should be"),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused(changes, num_columns, match):
    with pytest.raises(ValueError, match=match):
        ShortConvolutionOperand(CONVOLUTION._replace(**changes), torch.float32, num_columns)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(conv_weight=torch.zeros(17, 4)), "conv_weight should be of the channels"),
        (dict(norm_size=5), "normed by 5"),
        (dict(num_groups=2), "conv_weight should be of the channels"),
        (dict(columns=COLUMNS._replace(gates=20)), "columns should name"),
        (dict(columns=COLUMNS._replace(steps=[28, 29])), "columns should name"),
        (dict(columns=COLUMNS._replace(steps=[28, 29, 31])), "columns should name"),
        (dict(columns=COLUMNS._replace(runs=[(0, 12, 15)])), "columns should name"),
        (dict(states=torch.zeros(5, 3, 2, 4).double()), "states should be"),
        (dict(tails=torch.zeros(4, 3, 16)), "tails should be"),
        (dict(a_log=torch.zeros(4)), "rates should be"),
        (dict(skip=torch.zeros(2)), "skips should be"),
        (dict(norm=MAMBA.norm._replace(weight=torch.ones(4))), "norm should be"),
    ],
)
def test_a_recurrence_that_does_not_fit_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        MambaOperand(MAMBA._replace(**changes), torch.float32, 31)
