"""One rank of a small FSDP2 trainer that publishes its weights.

python sharded_trainer.py RANK WORLD_SIZE RENDEZVOUS STORE

Rank 0 publishes version 1 to STORE, and offers version 2 in process; the other ranks join the gathers.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sync


class Model(nn.Module):
    """Tied ends, a first dimension that two ranks cannot share evenly, and one smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Linear(4, 1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))


def build():
    torch.manual_seed(5)
    return Model()


def main(rank, world_size, rendezvous, store):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    model = build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if rank == 0:
        sync.publish(store, model, 1, num_threads=2)
        sender = sync.make_sender("inproc")
        manifest = sender.offer(model, 2, {"scale.bias": ("bfloat16", (1,))})
        received = dict(sync.make_receiver("inproc", sender=sender).receive(manifest))
        whole = build().state_dict()
        whole["scale.bias"] = whole["scale.bias"].bfloat16()
        assert received.keys() | {"head.weight"} == whole.keys()
        assert all(torch.equal(received[name], whole[name]) for name in received)
    else:
        sync.join_gathers(model)
        sync.join_gathers(model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
