"""The harsh interpreter sees what the plain one does not, and kernels pass their tests by it.

HARSH_INTERPRETER=1 runs all tests of this folder and of tests/unit/model/cuda by it; a few are here, always.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rollout_engine.kernels.triton.rounding import INTERPRETED
from tests.unit.kernels.triton.harsh_interpreter import OutOfBoundsError

# A few of the quicker tests of each kind of kernel, run again: pytest collects what is imported.
from tests.unit.kernels.triton.test_attention import (  # noqa: F401
    test_padding_of_a_captured_batch_is_left_alone,
)
from tests.unit.kernels.triton.test_block_copies import (  # noqa: F401
    test_every_byte_of_a_block_arrives_and_nothing_else_changes,
)
from tests.unit.kernels.triton.test_decode_inputs import (  # noqa: F401
    test_unknown_tokens_are_filled_in_and_tables_copied_as_they_have_become,
)
from tests.unit.kernels.triton.test_elementwise import test_a_norm_after_a_sum_leaves_the_rounded_sum  # noqa: F401
from tests.unit.kernels.triton.test_matmul import test_rows_may_lie_apart  # noqa: F401
from tests.unit.kernels.triton.test_rotary import test_interleaved_pairs_turn_as_in_cohere  # noqa: F401
from tests.unit.kernels.triton.test_sampling import (  # noqa: F401
    test_a_row_is_the_same_bits_in_any_batch,
    test_the_most_likely_tokens_are_those_of_the_twin,
    test_ties_at_the_edge_stay_in_order_of_ids,
)
from tests.unit.kernels.triton.test_work import test_a_chunk_becomes_items_of_so_many_tokens  # noqa: F401

ROOT = Path(__file__).parents[4]
pytestmark = [
    pytest.mark.skipif(not INTERPRETED.value, reason="a device is harsh by itself"),
    pytest.mark.usefixtures("harsh"),
    pytest.mark.filterwarnings(
        "ignore:invalid value encountered:RuntimeWarning",
        "ignore:overflow:RuntimeWarning",
        "ignore:divide by zero encountered in log:RuntimeWarning",
    ),
]


@triton.jit
def _running_sum(x_ptr, total_ptr):
    """Wrong: each program takes what the one before it has left."""
    i = tl.program_id(0)
    tl.store(total_ptr + i + 1, tl.load(total_ptr + i) + tl.load(x_ptr + i))


@triton.jit
def _count(out_ptr):
    place = out_ptr + (tl.program_id(0) * 5 + tl.program_id(1)) * 2 + tl.program_id(2)
    tl.store(place, tl.load(place) + 1)


@triton.jit
def _sum_unmasked(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Wrong: what the lanes past the end hold is anybody's guess."""
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + lane, mask=lane < size)))


@triton.jit
def _sum_past_the_end(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


@triton.jit
def _write_past_the_end(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


@triton.jit
def _exp(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.exp(tl.load(x_ptr + lane)))


@triton.jit
def _divide(x_ptr, quotient_ptr, rest_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane)
    tl.store(quotient_ptr + lane, x // 4)
    tl.store(rest_ptr + lane, x % 4)


def test_a_kernel_that_relies_on_the_order_of_programs_is_found():
    x, total = torch.ones(16), torch.zeros(17)
    _running_sum[(16,)](x, total)
    assert total[-1] != 16


def test_every_program_of_a_grid_runs_once():
    out = torch.zeros(3, 5, 2)
    _count[(3, 5, 2)](out)
    assert (out == 1).all()


def test_lanes_without_a_value_and_memory_past_the_end_are_nan():
    x, out = torch.ones(8)[:5].clone(), torch.zeros(1)
    _sum_unmasked[(1,)](x, out, 5, BLOCK=8)
    assert out.isnan().all()
    _sum_past_the_end[(1,)](x, out, BLOCK=8)
    assert out.isnan().all()


def test_a_write_past_the_end_is_an_error():
    with pytest.raises(OutOfBoundsError, match="_write_past_the_end writes past an end of 20 bytes"):
        _write_past_the_end[(1,)](torch.zeros(5), BLOCK=8)


def test_exp_is_off_by_its_bound_by_the_input_alone_and_exact_at_0():
    x, out = torch.linspace(-20, 20, 4096), torch.empty(4096)
    x[7] = 0.0
    _exp[(1,)](x, out, BLOCK=4096)
    exact = np.exp(x.numpy().astype(np.float64))
    error = np.abs(out.numpy() / exact - 1)
    assert 2.0**-22 < error.max() < 2.0**-21 + 2.0**-23 and out[7] == 1
    again = torch.empty(4096)
    _exp[(1,)](x.flip(0), again, BLOCK=4096)
    assert torch.equal(again.flip(0), out)


def test_integers_are_divided_towards_zero():
    x = torch.arange(-8, 8, dtype=torch.int32)
    quotient, rest = torch.empty_like(x), torch.empty_like(x)
    _divide[(1,)](x, quotient, rest, BLOCK=16)
    assert torch.equal(quotient, torch.div(x, 4, rounding_mode="trunc")) and torch.equal(rest, x - 4 * quotient)
    assert quotient[1] == -1 and rest[1] == -3


def test_uninitialised_memory_is_no_zero():
    assert torch.empty(1000).isnan().all() and (torch.empty(1000, dtype=torch.int32) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["kernels/triton", "model/cuda"])
def test_all_kernels_pass_their_tests_by_it(folder):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", f"tests/unit/{folder}"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HARSH_INTERPRETER": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
