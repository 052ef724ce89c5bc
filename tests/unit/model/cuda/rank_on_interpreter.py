"""A rank other than the first, whose device is the host's memory through Triton's interpreter; see `test_ranks.py`."""

import os

import pytest
import torch

from rollout_engine.execution import rank_main, rank_worker
from rollout_engine.model import backends
from rollout_engine.model.cuda import backend, decode_graphs
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.sampling import logit_rows
from tests.unit.kernels.triton.mended_interpreter import mend_interpreter


class RerunPool:
    """Stands in for `GraphPool`: a graph is the computation itself."""

    def __init__(self, all_agree=bool):
        self._all_agree = all_agree

    def capture(self, compute):
        compute()
        if not self._all_agree("NO_ROOM" not in os.environ):
            raise decode_graphs.NoRoomForGraph("so says a test")
        if "FAILS" in os.environ:
            raise ValueError("not permitted")
        return Rerun(compute)


class Rerun:
    """One graph."""

    num_replays = 0

    def __init__(self, compute):
        self._compute = compute

    def replay(self):
        Rerun.num_replays += 1
        self._compute()


def capture_by_rerunning(patch):
    """Have graphs that this process captures be reruns."""
    patch.setattr(decode_graphs, "GraphPool", RerunPool)


def capture_everywhere(patch):
    """Have engines that this process makes capture graphs."""
    patch.setattr(backend, "can_capture", lambda device: True)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        mend_interpreter(patch)
        device = backends.Device(torch.device("cpu"), CudaBackend)
        for module in (rank_main, rank_worker):
            patch.setattr(module, "device_of", lambda config: device)
        patch.setattr(logit_rows, "_PIECE_NUMEL", int(os.environ.get("PIECE_NUMEL", logit_rows._PIECE_NUMEL)))
        if "CAPTURES" in os.environ:
            capture_by_rerunning(patch)
            capture_everywhere(patch)
        rank_main.main()
