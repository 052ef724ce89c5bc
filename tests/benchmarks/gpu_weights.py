"""Figures of weights on a CUDA device: commits, pushes from another process and from a store, sleep. Parts of `gpu`.

    python -m tests.benchmarks.gpu_weights DIRECTORY SHAPE

is the trainer of the part `ipc`: a line "VERSION" asks for an offer, answered by its manifest; then it sends.
"""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import sync
from rollout_engine import LLM
from rollout_engine.kernels.triton.copies import FusedCopy
from rollout_engine.model.cuda.copy_stream import copy_stream_for
from rollout_engine.model.cuda.pinned_upload import PinnedUpload
from rollout_engine.model.cuda.shadow_memory import CudaShadowMemory
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.weights.copy_kernels import kernel_writer
from rollout_engine.weights.shadow import Shadow
from rollout_engine.weights.transaction import WeightUpdater
from sync.ipc import IpcReceiver, IpcSender
from sync.manifest import WeightManifest
from tests.benchmarks.gpu_engine import ENGINE, generate, seconds_of
from tests.benchmarks.gpu_shapes import SHAPES, Requests, write_config

_ROUNDS = 2
"""Of a push: the first also takes memory for the shadow."""
_THREADS = 4


def commit(name: str = "Qwen3-8B") -> dict[str, Any]:
    """A staged shadow made live, beside one device copy of the same bytes."""
    live = _weights(name)
    shadow = Shadow(CudaShadowMemory(copy_stream_for(torch.device("cuda", 0))))
    staged = {name: shadow.of(view).zero_() for name, view in live.items()}
    shadow.plan(live.values())
    fused = FusedCopy([(staged[name], view) for name, view in live.items()])
    copy_seconds = _copy_seconds(fused.num_bytes)
    found = {
        "num_bytes": fused.num_bytes,
        "copy_seconds": copy_seconds,
        "fused_seconds": seconds_of(fused.run),
        "foreach_seconds": seconds_of(lambda: torch._foreach_copy_(list(live.values()), list(staged.values()))),
        "commit_seconds": statistics.median(_clocked(shadow.commit) for _ in range(9)),
    }
    return found | {"times_the_copy": found["commit_seconds"] / copy_seconds}


def ipc(name: str = "Qwen3-8B") -> dict[str, Any]:
    """Weights of a trainer's process on this device come to an engine's, checked and committed.

    A push is timed from the offer to the word that all lies in the shadow and has its digest, as in `push.py`.
    """
    live, updater = _weights(name), None
    updater = _updater(live)
    num_bytes = sum(view.nbytes for view in live.values())
    found: dict[str, Any] = {"num_bytes": num_bytes, "copy_seconds": _copy_seconds(num_bytes)}
    updater.digest()  # compiles
    found["digest_seconds"] = _clocked(updater.digest)
    with tempfile.TemporaryDirectory() as folder, _Trainer(Path(folder) / "meeting", name) as trainer:
        receiver = IpcReceiver(trainer.directory)
        for version in range(1, _ROUNDS + 1):
            start = time.perf_counter()
            manifest = trainer.offer(version)
            offered = time.perf_counter()
            updater.begin(manifest)
            updater.receive(receiver)
            updater.verify()
            ready = time.perf_counter()
            updater.commit()
            committed = time.perf_counter()
            updater.confirm()
            found |= {
                "offer_seconds": offered - start,
                "receive_seconds": ready - offered,
                "commit_seconds": committed - ready,
                "confirm_seconds": time.perf_counter() - committed,
                "push_seconds": ready - start,
            }
        receiver.close()
    return found | {"times_the_copy": found["push_seconds"] / found["copy_seconds"]}


def store(name: str = "Qwen3-1.7B") -> dict[str, Any]:
    """A published version comes into the shadow: at rest, and while the engine decodes."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_config(Path(folder) / "model", name)), **ENGINE)
        updater: WeightUpdater = llm.frontend.client.driver.executor.worker.updater
        weights = {key: view.cpu() for key, view in updater.live("store").items()}
        manifest = sync.publish(Path(folder) / "store", weights, 1, num_threads=_THREADS)

        def push() -> None:
            receiver = sync.make_receiver("store", directory=Path(folder) / "store", num_threads=_THREADS)
            updater.begin(manifest)
            updater.receive(receiver)
            updater.verify()
            updater.abort()

        pushes = [_clocked(push) for _ in range(_ROUNDS)]
        requests = Requests.drawn(64)
        generate(llm, Requests.drawn(16, high=200, seed=1), logprobs=True)
        alone = _rate(llm, requests)
        beside = _Repeated(push)
        with beside:
            during = _rate(llm, requests)
        report = llm.update_weights(str(Path(folder) / "store"))
        return {
            "num_bytes": manifest.num_bytes,
            "pinned_copy_seconds": manifest.num_bytes / _pinned_bytes_per_second(),
            "push_seconds": pushes[-1],
            "push_seconds_while_decoding": statistics.median(beside.seconds) if beside.seconds else None,
            "tokens_per_second": alone,
            "tokens_per_second_while_pushed_to": during,
            "ratio": during / alone,
            "stall_seconds": report.stall_seconds,
        }


def sleeping(name: str = "Qwen3-8B") -> dict[str, Any]:
    """What the driver says is free again, and how long it takes: twice at level 1, then at level 2."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_config(Path(folder), name)), **ENGINE)
    requests = Requests.drawn(16, high=200, seed=1)
    generate(llm, requests, logprobs=True)
    free, total = torch.cuda.mem_get_info()
    (usage,) = llm.collective_rpc("get_memory_usage")
    found |= {"free_bytes": free, "total_bytes": total, "weight_bytes": usage["weights"], "kv_bytes": usage["kv_cache"]}
    for part, level in (("first, level 1", 1), ("second, level 1", 1), ("level 2", 2)):
        seconds = _clocked(lambda level=level: llm.sleep(level))
        asleep = torch.cuda.mem_get_info()[0]
        found[part] = {"sleep_seconds": seconds, "returned_bytes": asleep - free}
        if level == 1:
            found[part]["wake_seconds"] = _clocked(llm.wake_up)
            found[part]["first_steps_seconds"] = _clocked(lambda: generate(llm, requests, logprobs=True))
    return found


class _Trainer:
    """A process of its own on this device."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "tests.benchmarks.gpu_weights", str(directory), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._line()

    def offer(self, version: int) -> WeightManifest:
        """It then waits to send."""
        self._in.write(f"{version}\n".encode())
        self._in.flush()
        return msgspec.json.decode(self._line(), type=WeightManifest)

    def _line(self) -> bytes:
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"the trainer ended with {self._process.wait()}")
        return line

    def __enter__(self) -> "_Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._process.wait(timeout=60)
        self._out.close()


def be_trainer(directory: str, name: str) -> None:
    """See the module."""
    weights = _weights(name)
    metadata = {key: ("bfloat16", tuple(tensor.shape)) for key, tensor in weights.items()}
    sender = IpcSender(directory)
    print("ready", flush=True)
    for line in sys.stdin:
        manifest = sender.offer(weights, int(line), metadata)
        print(msgspec.json.encode(manifest).decode(), flush=True)
        sender.send()
    sender.close()


class _Repeated:
    """Does something over and over on a thread, between entry and exit."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.seconds: list[float] = []
        """Of each time."""
        self._work, self._ending = work, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            self.seconds.append(_clocked(self._work))


def sizes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Weights of a shape, in the forms that the fused layers read; those of heads' norms are left out."""
    shape = SHAPES[name]
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    queries, qkv = heads * head_dim, (heads + 2 * shape["num_key_value_heads"]) * head_dim
    layer = {"qkv": (qkv, hidden), "o": (hidden, queries), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    layer |= {"norm": (hidden,), "mlp_norm": (hidden,)}
    sizes = {f"{i}.{part}": size for i in range(shape["num_hidden_layers"]) for part, size in layer.items()}
    sizes |= {"embedding": (shape["vocab_size"], hidden)}
    if not shape["tie_word_embeddings"]:
        sizes |= {"head": (shape["vocab_size"], hidden)}
    return sizes


def _weights(name: str) -> dict[str, Tensor]:
    return {k: torch.randn(*size, dtype=torch.bfloat16, device="cuda") for k, size in sizes_of(name).items()}


def _updater(live: dict[str, Tensor]) -> WeightUpdater:
    """As the worker's."""
    device = torch.device("cuda", 0)
    lane = copy_stream_for(device)
    writer = kernel_writer(device, PinnedUpload(lane))
    return WeightUpdater.of(live, [], PackedWeights(nn.Module()), CudaShadowMemory(lane), writer=writer)


def _copy_seconds(num_bytes: int) -> float:
    one, other = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return seconds_of(lambda: other.copy_(one))


def _pinned_bytes_per_second() -> float:
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    return len(host) / seconds_of(lambda: there.copy_(host, non_blocking=True))


def _rate(llm: LLM, requests: Requests) -> float:
    """Tokens a second."""
    start = time.perf_counter()
    return generate(llm, requests, logprobs=True) / (time.perf_counter() - start)


def _clocked(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    be_trainer(*sys.argv[1:])
