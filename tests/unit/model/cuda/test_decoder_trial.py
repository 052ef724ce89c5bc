"""Whether our kernels run a model's layers, and how loudly it is said that they do not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.cuda import decoder_trial
from rollout_engine.model.cuda.backend import runs_fused
from rollout_engine.model.modules.structure_checks import UnsupportedStructure
from rollout_engine.testing import tiny_config


@pytest.fixture
def fused(monkeypatch, caplog):
    """A function from what the two forms of the layers compute, or raise, to (whether they are fused, levels, text)."""

    def run(ours, theirs=0.0, *, deterministic=False):
        caplog.set_level("INFO", "rollout_engine")

        def served(fused, shift=0):
            result = ours if fused else theirs
            if isinstance(result, Exception):
                raise result
            return [torch.ones(4) + result]

        monkeypatch.setattr(decoder_trial, "small_model", lambda module, geometry, block_size, fused, **options: fused)
        monkeypatch.setattr(decoder_trial, "served", served)
        module = nn.Linear(1, 1)
        module.config = tiny_config()
        loaded = SimpleNamespace(module=module, geometry=[])
        found = runs_fused(loaded, deterministic=deterministic, block_size=64)
        return found, [record.levelname for record in caplog.records], caplog.text

    return run


def test_layers_that_compute_the_same_are_fused_and_nothing_is_said(fused):
    assert fused(0.0) == (True, [], "")


def test_a_kernel_that_does_not_compile_here_is_a_warning(fused):
    found, levels, text = fused(RuntimeError("ptxas: 227 KiB of shared memory"))
    assert (found, levels) == (False, ["WARNING"])
    assert "run as modules, more slowly" in text and "RuntimeError: ptxas: 227 KiB" in text


def test_results_that_differ_are_a_warning(fused):
    found, levels, text = fused(0.5)
    assert (found, levels) == (False, ["WARNING"]) and "differ from its modules'" in text


def test_a_structure_that_is_not_supported_is_no_fault(fused):
    found, levels, text = fused(UnsupportedStructure("it has no gate_proj"))
    assert (found, levels) == (False, ["INFO"]) and "it has no gate_proj" in text


def test_deterministic_layers_that_fail_are_refused(fused):
    with pytest.raises(ConfigError, match="ptxas"):
        fused(RuntimeError("ptxas"), deterministic=True)
