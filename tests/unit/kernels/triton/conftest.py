"""Kernels run on a CUDA device where there is one, else through Triton's interpreter (`tests/conftest.py` asks)."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.unit.kernels.triton.harsh_interpreter import make_harsh  # noqa: E402


@pytest.fixture
def device() -> str:
    """The device of the tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def tensors_as_loop_bounds(monkeypatch):
    """The interpreter of Triton 3.6 takes int() of one-element arrays, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        if tensor is tl.tensor:
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


@pytest.fixture(autouse=True)
def language_patched_once(monkeypatch):
    """The interpreter patches all of `triton.language` again for each call of one kernel function by another."""
    patch = interpreter._patch_lang
    patched = set()

    def patch_what_is_not(function):
        languages = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # the launch: restored after it
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_not)


@pytest.fixture(autouse=True)
def products_in_one_order(monkeypatch):
    """A device computes a row alike at every place in a tile. numpy's matmul, which the interpreter uses, does not on
    processors with AVX2 alone.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        dtype = d.data.dtype
        product = np.einsum("...ik,...kj->...ij", a.data.astype(dtype), b.data.astype(dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def harsh(language_patched_once, monkeypatch):
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
