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
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sync
from sync.errors import ManifestMismatch
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


def run_ranks(script, *arguments):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(WORLD_SIZE), *map(str, arguments)], env=environment
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0] * WORLD_SIZE
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_an_averaged_model_is_read_as_what_it_averages():
    plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        plain[0].weight.add_(1.0)
    averaged.update_parameters(plain)
    found = dict(read_source(averaged))
    assert found.keys() == plain.state_dict().keys()
    assert torch.equal(found["0.weight"], averaged.module[0].weight)
    with pytest.raises(ManifestMismatch, match="AveragedModel: pass that model itself"):
        read_source(averaged.state_dict())


def parametrized():
    module = nn.Sequential(nn.Linear(2, 2))
    parametrize.register_parametrization(module[0], "weight", nn.Identity())
    return module


def pruned():
    module = nn.Sequential(nn.Linear(2, 2))
    prune.random_unstructured(module[0], "weight", amount=0.5)
    return module


def optimizer_state():
    return torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict()


REFUSED = {
    "parametrized": (parametrized, r"'0\.parametrizations\.weight\.original'.*remove_parametrizations"),
    "pruned": (pruned, r"'0\.weight_orig'.*prune\.remove"),
    "optimizer": (optimizer_state, "'state' is dict.*state of an optimizer: pass the model"),
    "quantized": (lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "'a'.*qint8"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_the_weights_of_a_model_is_refused_with_what_to_pass(kind):
    make, message = REFUSED[kind]
    with pytest.raises(ManifestMismatch, match=message):
        read_source(make())


@pytest.mark.slow
def test_ranks_never_wait_for_an_update_that_was_refused_and_a_rank_that_leaves_ends_one(tmp_path):
    run_ranks("leaving_trainer.py", tmp_path / "rendezvous")


@pytest.mark.slow
def test_a_module_sharded_by_fsdp2_is_gathered_whole(tmp_path):
    script, store = HERE / "sharded_trainer.py", tmp_path / "store"
    run_ranks(script.name, tmp_path / "rendezvous", store)
    whole = runpy.run_path(str(script))["build"]().state_dict()
    with sync.open_current(store) as published:
        assert published.manifest.aliases == [["embed.weight", "head.weight"]]
        assert published.tensors.keys() == whole.keys()
        assert all(torch.equal(published.tensors[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
def test_a_model_under_any_wrapper_is_read_as_the_plain_one(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "wrapped_trainer.py"), str(tmp_path / "rendezvous")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    right = result.stdout.splitlines()
    assert len(right) == len(set(right)) == 20 and "adapters, checkpoint, fsdp2, compile" in right
