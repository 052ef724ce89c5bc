"""A rank other than the first, whose device is the host's memory through Triton's interpreter; see `test_ranks.py`."""

import os

import pytest
import torch

from rollout_engine.execution import rank_main, rank_worker
from rollout_engine.model import backends
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.sampling import logit_rows
from tests.unit.kernels.triton.mended_interpreter import mend_interpreter

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        mend_interpreter(patch)
        device = backends.Device(torch.device("cpu"), CudaBackend)
        for module in (rank_main, rank_worker):
            patch.setattr(module, "device_of", lambda config: device)
        patch.setattr(logit_rows, "_PIECE_NUMEL", int(os.environ.get("PIECE_NUMEL", logit_rows._PIECE_NUMEL)))
        rank_main.main()
