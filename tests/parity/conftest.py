"""Checkpoints that parity tests share, made once."""

import pytest
import torch

from rollout_engine.testing import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(architecture, dtype) -> directory of a tiny random model."""
    made = {}

    def make(architecture, dtype=torch.float32):
        if (architecture, dtype) not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[architecture, dtype] = tiny_checkpoint(directory, architecture, dtype=dtype)
        return made[architecture, dtype]

    return make
