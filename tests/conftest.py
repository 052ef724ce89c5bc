"""Shared by all tests: fixed seeds, one thread unless a test asks for more, nothing left behind."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton asks when it is first imported, and transformers does that before the tests of its kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def fixed_state():
    """Seeded, single-threaded (several threads on a busy machine wait for one another), and restored afterwards."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def thread_count():
    """A function that sets torch's thread count for the rest of the test."""
    return torch.set_num_threads
