"""Fixtures for tests of trainers: a policy and an HTTP server with a tiny random model, ready in seconds on a CPU.

pytest loads this module in every run, so it imports nothing heavy: each fixture does when it is used.
Define `rollout_checkpoint` or `rollout_options` in a conftest.py of yours to have another model or other options.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollout_engine.testing as testing

if TYPE_CHECKING:
    from rollout_engine.rollouts.policy import RolloutPolicy
    from rollout_engine.serve.server import HttpServer


@pytest.fixture(scope="session")
def rollout_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Qwen3 with two layers, random float32 weights, and a byte tokenizer with a chat template."""
    return testing.tiny_checkpoint(tmp_path_factory.mktemp("rollout") / "tiny")


@pytest.fixture
def rollout_options() -> dict[str, Any]:
    """Fields of `EngineConfig` for `rollout_policy` that differ from those of `testing.local_policy`."""
    return {}


@pytest.fixture
def rollout_policy(rollout_checkpoint: Path, rollout_options: dict[str, Any]) -> "Iterator[RolloutPolicy]":
    """A `RolloutPolicy` of this process, at version 0. Each test has one of its own, and may update its weights."""
    with testing.local_policy(rollout_checkpoint, **rollout_options) as policy:
        yield policy


@pytest.fixture
def rollout_server(rollout_policy: "RolloutPolicy") -> "Iterator[HttpServer]":
    """An HTTP server of `rollout_policy` at `.url`, with OpenAI's, Anthropic's, vLLM's and SGLang's routes."""
    with testing.local_server(rollout_policy, sessions=True) as server:
        yield server
