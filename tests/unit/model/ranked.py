"""Rank 1 of 2 in a process of its own, for tests of what ranks compute together: it does what this process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.cpu.backend import CpuBackend
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.loading.loader import load_model
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.shared_exchange import TOTAL_BYTES, SharedExchange

PROMPT = [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
STEPS = (
    [SequenceChunk(PROMPT, 0, [3, 4], state_slot=1), SequenceChunk([5, 9], 0, [6], state_slot=0)],
    [SequenceChunk([21], 19, [3, 4], state_slot=1), SequenceChunk([8], 2, [6], state_slot=0)],
)


class Partner:
    """Rank 1, and the memory that it shares with rank 0, which is this process."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("ranks")
        os.ftruncate(self._memory, TOTAL_BYTES)
        command = [sys.executable, "-m", "tests.unit.model.ranked", str(self._memory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[self._memory], text=True)

    def begin(self, path: Path, **options: object) -> Seat:
        """Have rank 1 load a checkpoint and compute `STEPS`; returns the seat of rank 0, which does so too."""
        self._process.stdin.write(json.dumps([str(path), options]) + "\n")
        self._process.stdin.flush()
        return Seat(SharedExchange(self._memory, 0, 2))

    def end(self) -> None:
        self._process.terminate()  # its own end may take long on a busy machine
        self._process.wait()
        self._process.stdin.close()
        os.close(self._memory)


def backend_of(path: Path, seat: Seat | None = None, **options: object) -> CpuBackend:
    """The backend of a checkpoint, or one rank's."""
    config = EngineConfig(model=str(path), num_kv_blocks=64, skip_tokenizer_init=True, **options)
    loaded = load_model(config, torch.device("cpu"), seat)
    return CpuBackend(config, loaded, ())


def logits_of(backend: CpuBackend) -> list[torch.Tensor]:
    """Logits of the last tokens in each of `STEPS`."""
    model = backend.runner.model
    last = [[sum(len(c.token_ids) for c in chunks[: i + 1]) - 1 for i in range(len(chunks))] for chunks in STEPS]
    return [model.forward(chunks, rows).clone() for chunks, rows in zip(STEPS, last, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    gemm.is_fast = gemm.supports
    for line in sys.stdin:
        path, options = json.loads(line)
        seat = Seat(SharedExchange(int(sys.argv[1]), 1, 2))
        try:
            logits_of(backend_of(path, seat, **options))
        except BaseException:
            seat.exchange.break_()
            raise
