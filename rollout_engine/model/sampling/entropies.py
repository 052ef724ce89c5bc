"""Entropies of the distributions that a step draws from, for the rows that ask."""

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.kernels.entropy import row_figures
from rollout_engine.model.sampling.sampling_batch import SamplingBatch


def fill_entropies(out: ModelRunnerOutput, logits: Tensor, batch: SamplingBatch) -> None:
    """Fill `out.entropies` from the model's own `logits` [N, V]: of the rows of `batch` that ask, 0 in the others."""
    if not batch.wants_entropy.any():
        return
    rows = torch.from_numpy(batch.wants_entropy.nonzero()[0])
    out.entropies = np.zeros(len(batch.wants_entropy), np.float32)
    out.entropies[rows.numpy()] = row_figures(logits, rows, batch.row_temperatures[rows])[:, 2].float().numpy()
