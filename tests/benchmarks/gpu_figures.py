"""What the benchmarks of kernels on a CUDA device share: their options, graphs of calls, and how figures are shown."""

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

DEVICE = "cuda"
Figure = tuple[str, float]


def options(description: str | None) -> argparse.ArgumentParser:
    """Of all of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    return parser


def show(figures: Iterable[Figure], *, as_json: bool) -> None:
    """Print each on a line as soon as it is there; as JSON all in the end, with the device."""
    if as_json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps(about | dict(figures), indent=1))
        return
    for name, value in figures:
        print(f"{name:72} {value}", flush=True)


def captured(work: Callable[[], Any], warm_up: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, whose kernels `warm_up` has compiled."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm_up()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
