"""How long a push of weights takes beside a plain copy of the same bytes.

python tests/benchmarks/push.py [--transports shm,store,gloo] [--rounds 9] [--results FOLDER]

Trainer and engine are two processes on one machine, with one tmpfs between them. A push is timed from the offer to the
engine's word that every tensor lies in its shadow and has its digest. The plain copy, of the same tensors from one
place of this process to another, takes turns with the pushes. The first push makes fresh pages and is reported apart,
and so are pushes from float32 masters, which are cast on the way.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import results
import torch
from works import SHAPES

import sync
from rollout_engine.weights.copy_kernels import kernel_writer
from sync.digests import tensor_digest
from sync.manifest import WeightManifest, torch_dtype
from sync.threads import in_threads

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
NUM_THREADS = torch.get_num_threads()


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights of one of the benchmark's models."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        "q_norm": (head,), "k_norm": (head,), "norm1": (hidden,), "norm2": (hidden,),
    }  # fmt: skip
    layers = {f"{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()}
    ends = {"embed": (config["vocab_size"], hidden), "norm": (hidden,)}
    return ends | layers | ({} if config["tie_word_embeddings"] else {"head": (config["vocab_size"], hidden)})


class EngineProcess:
    """The receiving side: this file once more."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, __file__, "--engine"], stdin=pipe, stdout=pipe)

    def tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def be_engine() -> None:
    """First line: transport and options; then a manifest a line, each answered with the seconds it took."""
    first = json.loads(sys.stdin.readline())
    receiver = sync.make_receiver(first["transport"], **first["options"])
    shadow: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        manifest = msgspec.json.decode(line, type=WeightManifest)
        if not shadow:
            shadow = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in manifest.tensors}
        start = time.perf_counter()
        results = receiver.receive_into(shadow, manifest, kernel_writer())  # as the engine does
        assert results == {spec.name: (spec.digest, True) for spec in manifest.tensors}
        print(json.dumps({"receive": time.perf_counter() - start}), flush=True)
    receiver.close()


def measure(transport: str, shape: str, rounds: int) -> dict[str, Any]:
    """Milliseconds and ratios of one transport."""
    dtype = getattr(torch, SHAPES[shape]["dtype"])
    weights = {name: torch.randn(size).to(dtype) for name, size in shapes_of(SHAPES[shape]).items()}
    masters = {name: tensor.float() for name, tensor in weights.items()}
    metadata = {name: (SHAPES[shape]["dtype"], tuple(tensor.shape)) for name, tensor in weights.items()}
    elsewhere = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        sender_options, receiver_options = _options(transport, folder)
        engine = EngineProcess()
        engine.tell({"transport": transport, "options": receiver_options})
        sender = sync.make_sender(transport, **sender_options)
        times: dict[str, list[float]] = {}

        def note(name: str, seconds: float) -> None:
            times.setdefault(name, []).append(seconds * 1e3)

        def push(version: int, source: dict[str, torch.Tensor], kind: str) -> None:
            start = time.perf_counter()
            manifest = sender.offer(source, version, metadata)
            offered = time.perf_counter()
            engine.tell(manifest)
            sender.send()
            answer = engine.answer()
            note(f"{kind}_ms", time.perf_counter() - start)
            note(f"{kind}_offer_ms", offered - start)
            for part, seconds in answer.items():
                note(f"{kind}_{part}_ms", seconds)

        def copy() -> None:
            for name, tensor in weights.items():
                elsewhere[name].copy_(tensor)

        copy()
        push(1, weights, "first_push")
        for i in range(rounds):
            start = time.perf_counter()
            copy()
            note("copy_ms", time.perf_counter() - start)
            push(2 * i + 2, weights, "push")
            push(2 * i + 3, masters, "push_from_float32")
            start = time.perf_counter()
            in_threads(tensor_digest, weights.values(), NUM_THREADS)
            note("digest_ms", time.perf_counter() - start)
        sender.close()
        engine.close()
    median = {name: round(statistics.median(values[rounds > 3 :] or values), 2) for name, values in times.items()}
    return {
        "ratio_to_copy": round(median["push_ms"] / median["copy_ms"], 2),
        "digests_share": round(2 * median["digest_ms"] / median["push_ms"], 3),
        "megabytes": round(sum(math.prod(t.shape) * t.itemsize for t in weights.values()) / 1e6, 1),
        "num_threads": NUM_THREADS,
        "rounds": rounds,
    } | median


def _options(transport: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the sender, and those of the receiver."""
    threads = {"num_threads": NUM_THREADS}
    directory = {"directory": folder}
    match transport:
        case "shm":
            return directory | threads | {"writer": kernel_writer()}, directory | threads
        case "store":
            return directory | threads, directory | threads
        case "gloo":
            place = {"rendezvous": f"file://{folder}/rendezvous", "world_size": 2}
            return place, place | {"rank": 1}
    raise SystemExit(f"--transports: '{transport}' is not measured here: shm, store, gloo")


def main() -> None:
    """See the file's first lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default="shm,store,gloo")
    parser.add_argument("--shape", default="M", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if arguments.engine:
        be_engine()
        return
    for transport in arguments.transports.split(","):
        figure = measure(transport, arguments.shape, arguments.rounds)
        name = f"push by {transport}, {arguments.shape}"
        print(name, json.dumps(figure, indent=1), flush=True)
        results.save(arguments.results, name, figure, {}, f"push.py --rounds {arguments.rounds}")


if __name__ == "__main__":
    main()
