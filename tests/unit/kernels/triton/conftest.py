"""Kernels run on a CUDA device where there is one, else through Triton's interpreter (`tests/conftest.py` asks)."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.unit.kernels.triton.harsh_interpreter import make_harsh  # noqa: E402
from tests.unit.kernels.triton.mended_interpreter import mend_interpreter  # noqa: E402


@pytest.fixture
def device() -> str:
    """The device of the tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter as tests need it."""
    mend_interpreter(monkeypatch)


@pytest.fixture
def harsh(interpreter, monkeypatch):
    """The interpreter is as unkind as a device may be, and so is memory that is not initialised."""
    make_harsh(monkeypatch)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills what it does not initialise
    yield
    torch.use_deterministic_algorithms(was)


@pytest.fixture(autouse=True)
def harsh_if_asked(request):
    """With HARSH_INTERPRETER=1 in the environment the harsh interpreter runs all tests of kernels, but for modules with
    `GUARDS_MEMORY`: a fake device knows memory by its addresses, and guards it itself."""
    if os.environ.get("HARSH_INTERPRETER") == "1" and not getattr(request.module, "GUARDS_MEMORY", False):
        request.getfixturevalue("harsh")
