"""One rank of a small FSDP2 trainer in which things go wrong.

python leaving_trainer.py RANK WORLD_SIZE RENDEZVOUS

Rank 0's updates are refused, before a weight was gathered, while the others join the gathers; then the others leave
without a word, and rank 0's next update ends with an error.
"""

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sync
from rollout_engine import RolloutPolicy
from rollout_engine.base.errors import ManifestMismatchError, StaleVersionError, WeightUpdateError
from rollout_engine.testing import tiny_checkpoint, tiny_model


def model(mesh, **options):
    module = tiny_model("qwen2", seed=5, **options)
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def main(rank, world_size, rendezvous):
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=wait)
    mesh = init_device_mesh("cpu", (world_size,))
    fits, larger = model(mesh), model(mesh, hidden_size=128)
    if rank > 0:
        for source in (larger, fits, fits, fits):
            sync.join_gathers(source)
        dist.barrier()
        return
    store = f"{rendezvous}-store"
    with RolloutPolicy.from_pretrained(tiny_checkpoint(f"{rendezvous}-model", "qwen2"), dtype="float32") as policy:
        with pytest.raises(ManifestMismatchError, match="do not fit"):
            policy.update_weights(larger)
        with pytest.raises(StaleVersionError):
            policy.update_weights(fits, version=0)
        assert policy.update_weights(fits).version == 1
        sync.publish(store, {"a": torch.zeros(1)}, 7)
        with pytest.raises(sync.StaleVersion):
            sync.publish(store, fits, 6)
        dist.barrier()
        with pytest.raises(WeightUpdateError, match=r"could not be gathered.*sync\.join_gathers"):
            policy.update_weights(fits)
        assert policy.policy_version == 1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
