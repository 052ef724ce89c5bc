"""Two ranks with a thread each beside one process with two threads: tokens per second in turns, and memory.

    python -m tests.benchmarks.ranks [--shape M] [--rounds 5] [--dtype float32] [--executor ray]
    python -m tests.benchmarks.ranks --stages [--prompts 64]
    python -m tests.benchmarks.ranks --memory [--shape M] [--dtype float32] [--layers 12]

A model as large as M of the other benchmarks, or E, a mixture of experts, generates for 32 prompts; ratios compare
rounds that follow one another. With `--stages` two stages take the place of two ranks. Memory is that of each process
of an engine which is alone in a program of its own, after generations and after an update beside the live weights: PSS,
which counts a page that n processes share as 1/n, and USS, which leaves it out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint

M = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=4096,
    std=0.05,
)
E = M | dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True)
SHAPES = {"M": ("qwen3", M), "E": ("qwen3_moe", E)}
"""Architecture and fields."""
PROMPTS = [{"prompt_token_ids": [5 + (7 * i + j) % 900 for j in range(64)]} for i in range(256)]


def main() -> None:
    """Print tokens per second of each round and the median of the ratios, or what each process takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=M["num_hidden_layers"])
    parser.add_argument("--executor", choices=["process", "ray"], default="process", help="where the other rank runs")
    parser.add_argument("--stages", action="store_true", help="divide layers among two stages")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--memory", action="store_true", help="print memory, not speed")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # of the engine whose memory this program measures
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    architecture, fields = SHAPES[arguments.shape]
    del PROMPTS[arguments.prompts :]
    if arguments.checkpoint:
        print(json.dumps(_memory_here(arguments.checkpoint, arguments.ranks, arguments.dtype)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = str(tiny_checkpoint(directory, architecture, **fields | dict(num_hidden_layers=arguments.layers)))
        if arguments.memory:
            _compare_memory(path, arguments.dtype)
        else:
            options = dict(pipeline_parallel_size=2) if arguments.stages else dict(tensor_parallel_size=2)
            _compare_speed(path, arguments.dtype, arguments.rounds, options | dict(executor=arguments.executor))


def _compare_speed(path: str, dtype: str, num_rounds: int, of_two: dict[str, object]) -> None:
    two = _engine(path, 1, dtype, num_threads=1, **of_two)
    one = _engine(path, 1, dtype, num_threads=2)
    try:
        print(two.collective_rpc("get_memory_usage"), one.collective_rpc("get_memory_usage"))
        ratios = [_round(one, two, number) for number in range(num_rounds)]
        print(f"median ratio {statistics.median(ratios):.2f}")
    finally:
        two.shutdown()
        one.shutdown()


def _engine(path: str, num_ranks: int, dtype: str, num_threads: int, **more: object) -> LLM:
    options = dict(dtype=dtype, skip_tokenizer_init=True, log_stats=False, num_kv_blocks=1024)
    return LLM(path, num_threads=num_threads, **(options | dict(tensor_parallel_size=num_ranks) | more))


def _compare_memory(path: str, dtype: str) -> None:
    found = {}
    for num_ranks in (1, 2):
        command = [sys.executable, "-m", "tests.benchmarks.ranks", "--checkpoint", path, "--ranks", str(num_ranks)]
        command += ["--dtype", dtype]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[num_ranks] = json.loads(output.splitlines()[-1])
        print(f"{num_ranks} ranks, MB: {json.dumps(found[num_ranks])}")
    for moment in ("generated", "updated"):
        for kind in ("pss", "uss"):
            (one,), ranks = (found[n][moment][kind] for n in (1, 2))
            beyond = [each - found[1]["imported"][kind][0] for each in (max(ranks), one)]
            print(
                f"{moment}, {kind}: the largest rank {max(ranks) / one:.2f} of one process, "
                f"{beyond[0] / beyond[1]:.2f} of what it takes beyond imports"
            )


def _memory_here(path: str, num_ranks: int, dtype: str) -> dict[str, dict[str, list[int]]]:
    """MB of every process of an engine of this program: as imported, after generations, after updates."""
    found = {"imported": _memory_of_processes()}
    with _engine(path, num_ranks, dtype, num_threads=2 // num_ranks) as engine:
        for seed in range(2):
            _tokens_per_second(engine, 2 // num_ranks, seed)
        found["generated"] = _memory_of_processes()
        for seed in range(2):
            engine.update_weights(_source(path, getattr(torch, dtype)))
            _tokens_per_second(engine, 2 // num_ranks, seed)
        found["updated"] = _memory_of_processes()
    return found


def _source(path: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights that take no memory: each is one number, over and over."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return {name: torch.tensor(0.01, dtype=dtype).expand(t.shape) for name, t in module.state_dict().items()}


def _memory_of_processes() -> dict[str, list[int]]:
    own = psutil.Process()
    each = [process.memory_full_info() for process in (own, *own.children()) if process.name() != "sh"]
    return {kind: [getattr(info, kind) // 10**6 for info in each] for kind in ("pss", "uss")}


def _round(one: LLM, two: LLM, number: int) -> float:
    speeds = [_tokens_per_second(engine, threads, number) for engine, threads in ((one, 2), (two, 1), (one, 2))]
    base = (speeds[0] + speeds[2]) / 2
    print(f"one {base:.0f}, two ranks {speeds[1]:.0f} tokens/s: {speeds[1] / base:.2f}")
    return speeds[1] / base


def _tokens_per_second(engine: LLM, num_threads: int, seed: int) -> float:
    torch.set_num_threads(num_threads)  # both engines compute in this process
    params = SamplingParams(max_tokens=48, ignore_eos=True, seed=seed, logprobs=0)
    start = time.perf_counter()
    engine.generate(PROMPTS, params, use_tqdm=False)
    return 48 * len(PROMPTS) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
