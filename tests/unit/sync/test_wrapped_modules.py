"""Modules as distributed trainers hold them give the names and tensors of the plain module."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sync
from sync.source import read_source

HERE = Path(__file__).parent
WORLD_SIZE = 2


def test_a_module_under_ddp_gives_its_own_names(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1)
    try:
        plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        wrapped = dict(read_source(DistributedDataParallel(plain)))
    finally:
        dist.destroy_process_group()
    assert wrapped.keys() == plain.state_dict().keys()
    assert all(wrapped[name].data_ptr() == t.data_ptr() for name, t in plain.state_dict().items())


@pytest.mark.slow
def test_a_module_sharded_by_fsdp2_is_gathered_whole(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    script, store = str(HERE / "sharded_trainer.py"), tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(WORLD_SIZE), str(tmp_path / "rendezvous"), str(store)],
            env=environment,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0] * WORLD_SIZE
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    whole = runpy.run_path(script)["build"]().state_dict()
    with sync.open_current(store) as published:
        assert published.manifest.aliases == [["embed.weight", "head.weight"]]
        assert published.tensors.keys() == whole.keys()
        assert all(torch.equal(published.tensors[name], tensor) for name, tensor in whole.items())


def test_a_model_under_any_wrapper_is_read_as_the_plain_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "wrapped_trainer.py"), str(tmp_path / "rendezvous")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    right = result.stdout.splitlines()
    assert len(right) == len(set(right)) == 16 and "adapters, fsdp2, compile" in right
