"""Models under the wrappers of trainers, one rank, each read as a source and compared with the plain model.

python wrapped_trainer.py RENDEZVOUS: prints the names of what was right.
"""

import runpy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sync.errors import ManifestMismatch
from sync.lazy_tensor import materialized
from sync.source import read_source

ADAPTED = runpy.run_path(str(Path(__file__).parent / "adapted.py"))


def plain():
    torch.manual_seed(1)
    return ADAPTED["Inner"]()


def fsdp1(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    mesh = init_device_mesh("cpu", (1,))
    inner = model if hasattr(model, "layers") else model.base_model.model
    for layer in inner.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda module: hasattr(module, "layers"))
    return model


WRAPPERS = {
    "ddp": [DistributedDataParallel],
    "compile": [torch.compile],
    "fsdp1": [fsdp1],
    "fsdp2": [fsdp2],
    "compile, ddp": [torch.compile, DistributedDataParallel],
    "ddp, compile": [DistributedDataParallel, torch.compile],
    "fsdp1, compile": [fsdp1, torch.compile],
    "fsdp2, compile": [fsdp2, torch.compile],
    "checkpoint": [checkpointed],
    "checkpoint, fsdp2, compile": [checkpointed, fsdp2, torch.compile],
}


def check(name, model, expected):
    for wrap in WRAPPERS[name]:
        model = wrap(model)
    found = {key: materialized(tensor) for key, tensor in read_source(model)}
    assert found.keys() == expected.keys(), (name, found.keys())
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name


def main(rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    for name in WRAPPERS:
        check(name, plain(), plain().state_dict())
        print(name)
    for name in WRAPPERS:
        model = ADAPTED["build"]()
        if name.startswith("fsdp1"):
            try:
                check(name, model, {})
            except ManifestMismatch as problem:
                assert "under FSDP1 cannot be merged" in str(problem)
        else:
            check(name, model, ADAPTED["merged"](ADAPTED["build"]()))
        print("adapters,", name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
