"""What a version takes in a store that is published as changes, after steps of Adam with the learning rate of RL.

python tests/benchmarks/store_delta.py [--shape M] [--steps 5] [--dtype bfloat16] [--masters]

Every weight gets a gradient, drawn at random: real ones leave rows of the embeddings out, and change less. A share is
bytes of a link, its manifest and JSON included, over those of the whole version. Seconds are of one thread: to publish
whole and as changes, and to read the store with the anchor alone and with all links behind it. `--masters`: the
optimizer steps weights in float32, which are cast; without, weights of the dtype itself, of which most steps are lost.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from works import SHAPES, write_config

import sync
from sync.pointer import read_pointer

LEARNING_RATE = 1e-6


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def link_bytes(store: Path) -> int:
    """Bytes of all files of the current version."""
    return sum(path.stat().st_size for path in (store / "versions" / read_pointer(store).directory).iterdir())


def measure(folder: Path, shape: str, dtype: torch.dtype, steps: int, *, masters: bool) -> dict[str, Any]:
    """The figure."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(folder / "m", shape)), dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    work = [p.detach().to(torch.float32 if masters else dtype).requires_grad_() for p in model.parameters()]
    chain = dict(delta=True, anchor_every=steps + 1)
    optimizer = torch.optim.AdamW(work, lr=LEARNING_RATE)

    def weights() -> dict[str, torch.Tensor]:
        return dict(zip(names, (p.detach().to(dtype) for p in work), strict=True))

    store, whole = folder / "store", folder / "whole"
    total = sync.publish(store, weights(), 1, **chain).num_bytes
    figures: dict[str, list[float]] = {"share": [], "publish_s": [], "publish_whole_s": []}
    anchor_seconds = timed(lambda: sync.open_current(store).close())
    for version in range(2, steps + 2):
        for parameter in work:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        now = weights()
        figures["publish_s"].append(timed(lambda now=now, v=version: sync.publish(store, now, v, **chain)))
        figures["publish_whole_s"].append(timed(lambda now=now, v=version: sync.publish(whole, now, v)))
        figures["share"].append(link_bytes(store) / total)
    with sync.open_current(store) as published, sync.open_current(whole) as expected:
        assert published.manifest.digest == expected.manifest.digest
    return {
        **{name: [round(value, 4) for value in values] for name, values in figures.items()},
        "read_anchor_s": round(anchor_seconds, 3),
        "read_chain_s": round(timed(lambda: sync.open_current(store).close()), 3),
        "read_whole_s": round(timed(lambda: sync.open_current(whole).close()), 3),
        "megabytes": round(total / 1e6, 1),
    }


def main() -> None:
    """See the file's first lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="M", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--masters", action="store_true")
    parser.add_argument("--results", type=Path, default=None, help="directory for the figure")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dtype = getattr(torch, arguments.dtype)
        figure = measure(Path(folder), arguments.shape, dtype, arguments.steps, masters=arguments.masters)
    name = f"store of changes, {arguments.shape}, {arguments.dtype}" + (", masters" if arguments.masters else "")
    print(name, json.dumps(figure, indent=1), flush=True)
    if arguments.results is not None:
        command = f"store_delta.py --shape {arguments.shape} --steps {arguments.steps} --dtype {arguments.dtype}"
        results.save(arguments.results, name, figure, {}, command)


if __name__ == "__main__":
    main()
