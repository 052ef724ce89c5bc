"""Checkpoints that parity tests share, made once."""

import pytest
import torch

from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.architectures import sizes_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(architecture, dtype, **overrides) -> directory of a tiny random model."""
    made = {}

    def make(architecture, dtype=torch.float32, **overrides):
        key = (architecture, dtype, repr(overrides))
        if key not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[key] = tiny_checkpoint(directory, architecture, dtype=dtype, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def sized_checkpoint(checkpoint):
    """sized_checkpoint(name, dtype, **overrides) -> as `checkpoint`, of an architecture or a variant in its sizes."""

    def make(name, dtype=torch.float32, **overrides):
        architecture, sizes = sizes_of(name)
        return checkpoint(architecture, dtype, **sizes | overrides)

    return make
