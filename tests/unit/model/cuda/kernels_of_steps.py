"""Collects which kernels, compiled for which arguments, an engine launches at load and in random steps, as JSON.

    python -m tests.unit.model.cuda.kernels_of_steps ARCHITECTURE DTYPE [OPTION=VALUE ...]

Triton says for each launch which compiled kernel it wants, and gets one that does nothing; tensors are in host memory,
and drawn tokens are 0. The keys are Triton's own: dtypes, alignment of addresses, sizes, constants.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rollout_engine import LLM, SamplingParams
from rollout_engine.execution import worker
from rollout_engine.kernels.row_stats import RowStats
from rollout_engine.kernels.triton import launches
from rollout_engine.kernels.triton.outcome import Status
from rollout_engine.model import backends
from rollout_engine.model.cuda import backend, decode_graphs, runner, upload
from rollout_engine.testing.architectures import HYBRID_SIZES
from rollout_engine.testing.models import tiny_checkpoint

NUM_ROUNDS = 10
CONTEXT = 200
OPTIONS = {
    "max_model_len": CONTEXT,
    "num_kv_blocks": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": True,
    "log_stats": False,
}


class Hopper:
    """Satisfies what Triton asks a driver for before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Idle:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


class Rerun:
    """A graph: the computation itself."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute


class Graphs(decode_graphs.DecodeGraphs):
    """Graphs for up to two sequences; steps of more run without."""

    made: ClassVar[list["Graphs"]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, capture=Rerun)
        self._sizes = [1, 2]
        self.made.append(self)


def watch() -> set[str]:
    """The kernels launched from now on, by name and key."""
    launched: set[str] = set()

    def compiled(function: JITFunction[Any], key: str, signature: Any, device: int, *_: Any) -> Idle:
        launched.add(f"{function.__name__} {key}")
        function.device_caches[device][0][key] = Idle()
        return Idle()

    JITFunction._do_compile = compiled
    driver.set_active(Hopper())
    launches._IS_TESTED = False  # each launch asks Triton
    return launched


class Drawn(upload.Download):
    """Where no kernel draws: token 0 of each row, whose draw succeeded, and log-probs of 0."""

    def wait(self) -> Tensor:
        found = torch.zeros_like(super().wait())
        if found.dtype == torch.float64:  # an outcome, and not log-probs of a prompt
            found[:, 2] = Status.DRAWN
        return found


def draw_token_0() -> None:
    """Let every kernel that draws have drawn token 0."""
    empty = RowStats.empty
    RowStats.empty = lambda num_rows, device: RowStats(*map(torch.zeros_like, empty(num_rows, device)))
    runner.Download = Drawn


def params(rng: random.Random) -> SamplingParams:
    """Any mix of what steps draw differently for."""
    chosen: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 1.0, 0.9]),
        "top_k": rng.choice([0, 0, 1, 20]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "logit_bias": rng.choice([None, None, {7: 4.0, 9: -3.0}]),
        "allowed_token_ids": rng.choice([None, None, None, list(range(40))]),
        "min_tokens": rng.choice([0, 2]),
        "stop_token_ids": rng.choice([None, [5, 6]]),
        "logprobs": rng.choice([None, 0, 1, 2, 5, 16]),
        "logprobs_mode": rng.choice(["tempered", "raw", "processed"]),
        "prompt_logprobs": rng.choice([None, None, 0, 3]),
    }
    return SamplingParams(**chosen, n=rng.choice([1, 1, 2, 5]), max_tokens=rng.choice([2, 3, 20]), ignore_eos=True)


def run(llm: LLM, rng: random.Random) -> None:
    """Steps of random requests, some of which share prefixes, and scores."""
    shared = [rng.randrange(200) for _ in range(150)]
    for _ in range(NUM_ROUNDS):
        size = rng.choice([1, 2, 3, 7])
        prompts = [
            shared[: rng.choice([80, 129, 140])] if rng.random() < 0.4 else [rng.randrange(200)] * rng.randrange(1, 90)
            for _ in range(size)
        ]
        asked = [params(rng) for _ in prompts]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        assert not any(sample.error for output in outputs for sample in output.outputs)
        if rng.random() < 0.3:
            prompt, completion = [7] * rng.randrange(1, 150), [8] * rng.randrange(1, 9)
            llm.score([prompt], [completion])
            if (routing := llm.frontend.client.info.routing) is not None:
                own = np.full((len(prompt) + len(completion) - 1, *routing.shape), -1)
                llm.score([prompt], [completion], routed_experts=[own])


def engine(architecture: str, options: dict[str, Any]) -> LLM:
    where = backends.Device(torch.device("cpu"), backend.CudaBackend)
    worker.device_of = lambda config: where
    backend.runs_fused = lambda loaded, **_: architecture != "gemma2"  # nothing is computed to compare
    backend.can_capture = lambda device: True
    backend.DecodeGraphs = Graphs
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(Path(folder), architecture, **HYBRID_SIZES.get(architecture, {}))
        return LLM(str(path), **(OPTIONS | options))


def main(architecture: str, dtype: str, *given: str) -> None:
    options: dict[str, Any] = {"dtype": dtype} | {
        name: json.loads(value) for name, value in (g.split("=") for g in given)
    }
    if options.pop("cold", False):
        backend.warm_up = lambda runner: None
    torch.set_num_threads(1)
    launched = watch()
    draw_token_0()
    llm = engine(architecture, options)
    at_load = set(launched)
    run(llm, random.Random(0))
    preempted, graphs = llm.llm_engine.stats.num_preemptions, sum(len(made._graphs) for made in Graphs.made)
    llm.shutdown()
    names = sorted({each.split()[0] for each in launched})
    later = sorted(launched - at_load)
    print(json.dumps({"launched": names, "later": later, "num_preemptions": preempted, "num_graphs": graphs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
