"""One of two ranks of a trainer that Accelerate has prepared, after one optimizer step.

python accelerated_trainer.py KIND RENDEZVOUS: environment variables say which rank it is. Each rank reads the model as
a source and compares it with what the same step makes of the plain model.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model

from rollout_engine.testing import tiny_model
from sync.lazy_tensor import materialized
from sync.source import read_source


def build(kind):
    torch.manual_seed(1)
    model = tiny_model("qwen2", seed=3)
    if "peft" not in kind:
        return model
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def step(model, optimizer, backward):
    loss = model(input_ids=torch.arange(6)[None]).logits.square().mean()
    backward(loss)
    optimizer.step()


def main(kind, rendezvous):
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    plugin = None
    if kind.startswith("fsdp2"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = build(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer, accelerator.backward)
    found = {name: materialized(tensor) for name, tensor in read_source(model)}

    twin = build(kind)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), torch.Tensor.backward)
    expected = (twin.merge_and_unload() if "peft" in kind else twin).state_dict()
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
