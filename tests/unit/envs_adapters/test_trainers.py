"""Adapters of trainers whose packages are not installed."""

import importlib
import sys

import pytest

from envs_adapters.trainers.package import Package
from rollout_engine.base.errors import ConfigError


def test_a_package_that_is_missing_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.delitem(sys.modules, "envs_adapters.trainers.torchrl", raising=False)
    with pytest.raises(ConfigError, match=r"TorchRL is not installed: pip install 'rollout-engine\[torchrl\]'"):
        importlib.import_module("envs_adapters.trainers.torchrl")
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[no-such\]'"):
        Package("Such", "no-such", "1.0").check()


def test_what_is_missing_in_a_package_is_named_with_the_release_that_has_it():
    error = Package("Pytest", "pytest", "1.2").make_missing_error("Session has no items")
    assert "Session has no items, which this adapter needs; it is tested with Pytest 1.2, and" in str(error)
    assert "pip install 'pytest==1.2.*'" in str(error)
