"""Triton's interpreter as tests need it: it runs with this numpy, faster, and multiplies as a device does."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend_interpreter(monkeypatch):
    """Change the interpreter until `monkeypatch` undoes it."""
    _index_by_tensors(monkeypatch)
    _patch_language_once(monkeypatch)
    _multiply_in_one_order(monkeypatch)


def _index_by_tensors(monkeypatch):
    """The interpreter of Triton 3.6 takes int() of one-element arrays, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        if tensor is tl.tensor:
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


def _patch_language_once(monkeypatch):
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


def _multiply_in_one_order(monkeypatch):
    """A device computes a row alike at every place in a tile. numpy's matmul, which the interpreter uses, does not on
    processors with AVX2 alone.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        dtype = d.data.dtype
        product = np.einsum("...ik,...kj->...ij", a.data.astype(dtype), b.data.astype(dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
