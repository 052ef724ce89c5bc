"""The eager twin's products are checked at start-up where there is no C++ kernel."""

import pytest
import torch

from rollout_engine.kernels import paged_attention
from rollout_engine.kernels.linear import NotInvariant


def test_a_cpu_whose_products_depend_on_their_height_is_refused(monkeypatch):
    monkeypatch.setattr(paged_attention, "_rows_are_independent", lambda dim: False)
    monkeypatch.setattr(paged_attention.compiled, "supports", lambda dtype: False)
    with pytest.raises(NotInvariant, match="head size 20"):
        paged_attention.prove_row_invariance({20}, torch.float32)


def test_the_kernel_needs_no_such_proof(monkeypatch):
    monkeypatch.setattr(paged_attention, "_rows_are_independent", lambda dim: False)
    monkeypatch.setattr(paged_attention.compiled, "supports", lambda dtype: True)
    paged_attention.prove_row_invariance({20}, torch.float32)
