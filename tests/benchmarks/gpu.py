"""Figures of a CUDA device: generation beside its roofline and Hugging Face, what parts of the engine bring, weights.

    python -m tests.benchmarks.gpu [--seconds 520] [--parts copy "Qwen3-0.6B"]

Every part is a process of its own with a time limit, so that one that fails leaves the others their figures: forked
from this one, which imports all that they need and never uses the device. Results are written after each, to
tests/benchmarks/results/<device>/<date>.json, and a trace of some steps next to it.
Without a GPU it says what is missing and writes nothing.
"""

import argparse
import datetime
import gc
import gzip
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from rollout_engine import LLM, SamplingParams
from tests.benchmarks import gpu_exact, gpu_trace, gpu_weights
from tests.benchmarks.gpu_engine import ENGINE, generate, seconds_of
from tests.benchmarks.gpu_shapes import Requests, least_seconds, write_config
from tests.benchmarks.results import revision
from tests.gpu_check import require_gpu

RESULTS = Path(__file__).parent / "results"


def limits() -> dict[str, float]:
    """The device's own: bytes read and written a second by a copy, and the rate of a large product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / seconds_of(lambda: target.copy_(source)),
        "product_flop_per_second": 2 * 8192**3 / seconds_of(lambda: torch.mm(a, b, out=out)),
    }


def small_benchmark(name: str, *, share: bool = True, logprobs: bool = True, **options: Any) -> dict[str, Any]:
    """Tokens a second of 256 requests, after a warm-up, and the share of the roofline at this run's limits."""
    requests = Requests.drawn()
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(str(write_config(Path(directory), name)), **(ENGINE | options))
    generate(llm, Requests.drawn(16, high=200, seed=1), logprobs)
    start = time.perf_counter()
    num_tokens = generate(llm, requests, logprobs)
    seconds = time.perf_counter() - start
    found = {"tokens_per_second": num_tokens / seconds, "seconds": seconds, "num_tokens": num_tokens}
    found["choices"] = llm.frontend.client.driver.executor.worker.info.choices
    llm.shutdown()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    if share:
        measured = limits()
        least = least_seconds(name, requests, *measured.values())
        found |= {"share_of_roofline": least / seconds, "least_seconds": least} | measured
    return found


def two_devices(name: str, **options: Any) -> dict[str, Any]:
    """`small_benchmark` of a model that is cut over two devices."""
    if torch.cuda.device_count() < 2:
        raise SystemExit("it needs two devices, and here is one")
    return small_benchmark(name, share=False, tensor_parallel_size=2, **options)


def groups() -> dict[str, Any]:
    """32 prompts of 2,048 tokens x 16 samples: with and without reading shared prefixes once."""
    found = {}
    requests = Requests.drawn(32, low=2048, high=2048)
    params = SamplingParams(n=16, temperature=1.0, max_tokens=256, logprobs=0, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            str(write_config(Path(directory), "Qwen3-0.6B")),
            **(ENGINE | {"max_model_len": 2560, "max_num_seqs": 512}),
        )
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in requests.prompts]
    runner = llm.frontend.client.driver.executor.worker.runner
    shape = runner._prefix_shape
    for name, chosen in (("warm-up", shape), ("shared", shape), ("alone", None)):
        runner._prefix_shape = chosen
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        found[f"{name}_seconds"] = time.perf_counter() - start
    return found | {"speedup": found["alone_seconds"] / found["shared_seconds"]}


def hugging_face(count: int = 64) -> dict[str, Any]:
    """Continuous batching of transformers over the first requests of the benchmark."""
    requests = Requests.drawn()
    with tempfile.TemporaryDirectory() as directory:
        config = transformers.AutoConfig.from_pretrained(write_config(Path(directory), "Qwen3-0.6B"))
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation("sdpa")
    longest = max(requests.num_sampled[:count])
    chosen = transformers.GenerationConfig(max_new_tokens=longest, do_sample=True, eos_token_id=-1)
    start = time.perf_counter()
    outputs = model.generate_batch(requests.prompts[:count], generation_config=chosen)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return {"tokens_per_second": num_tokens / seconds, "seconds": seconds, "num_requests": count}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "limits": limits,
    "Qwen3-0.6B": partial(small_benchmark, "Qwen3-0.6B"),
    "Qwen2.5-0.5B": partial(small_benchmark, "Qwen2.5-0.5B"),
    "trace": gpu_trace.trace,
    "Qwen3-0.6B, without graphs": partial(small_benchmark, "Qwen3-0.6B", share=False, cuda_graphs=False),
    "Qwen3-0.6B, one step at a time": partial(small_benchmark, "Qwen3-0.6B", share=False, async_scheduling=False),
    "Qwen3-0.6B, deterministic": partial(small_benchmark, "Qwen3-0.6B", share=False, deterministic=True),
    "Qwen3-0.6B, exact trainer": gpu_exact.exactness,
    "Qwen3-0.6B, without log-probs": partial(small_benchmark, "Qwen3-0.6B", share=False, logprobs=False),
    "groups": groups,
    "commit": gpu_weights.commit,
    "ipc": gpu_weights.ipc,
    "store": gpu_weights.store,
    "sleep": gpu_weights.sleeping,
    "Hugging Face": hugging_face,
    "Qwen3-1.7B": partial(small_benchmark, "Qwen3-1.7B"),
    "Qwen3-8B": partial(small_benchmark, "Qwen3-8B"),
    "Qwen3-1.7B, two devices": partial(two_devices, "Qwen3-1.7B"),
    "Qwen3-1.7B, two devices, deterministic": partial(two_devices, "Qwen3-1.7B", deterministic=True),
    "Llama-3.2-1B": partial(small_benchmark, "Llama-3.2-1B"),
    "Gemma-2-2B": partial(small_benchmark, "Gemma-2-2B", share=False),
}
_MOST_SECONDS = 120.0
"""Of one part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=520.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=PARTS, help="run one part here and print its figures")
    args = parser.parse_args()
    if args.only:
        require_gpu()
        print(json.dumps(PARTS[args.only]()))
        return
    about = _in_process(_about, _MOST_SECONDS)
    if "error" in about:
        raise SystemExit(about["error"])
    end, found = time.monotonic() + args.seconds, {}
    path = _path(args.results, about["device"])
    for part in args.parts:
        left = min(_MOST_SECONDS, end - time.monotonic())
        found[part] = _run(part, left) if left > 5 else {"error": "no time was left for it"}
        if "events" in found[part]:
            trace = json.dumps({"traceEvents": found[part].pop("events")}).encode()
            path.with_suffix(".trace.json.gz").write_bytes(gzip.compress(trace))
        print(part, json.dumps(found[part]), flush=True)
        found[part] |= {"revision": revision(), "command": f"python -m tests.benchmarks.gpu --parts '{part}'"}
        path.write_text(json.dumps(about | {"figures": found}, indent=1) + "\n")
    print(path)


def _about() -> dict[str, Any]:
    require_gpu()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def _run(part: str, seconds: float) -> dict[str, Any]:
    return _in_process(PARTS[part], seconds)


def _in_process(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What `work` finds in a process forked from this one, or an "error" that says what became of it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_tell, args=(work, writer))
    process.start()
    writer.close()
    found: dict[str, Any]
    try:
        found = (
            json.loads(reader.recv_bytes()) if reader.poll(seconds) else {"error": f"not done after {seconds:.0f} s"}
        )
    except EOFError:
        process.join()
        found = {"error": f"its process ended with {process.exitcode}"}
    process.kill()  # its figures are told: nothing is lost
    process.join()
    return found


def _tell(work: Callable[[], dict[str, Any]], writer: Connection) -> None:
    """Do the work in a process of its own."""
    try:
        found = work()
    except SystemExit as sentence:
        found = {"error": str(sentence)}
    except BaseException:
        found = {"error": traceback.format_exc()[-2000:]}
    writer.send_bytes(json.dumps(found).encode())


def _path(results: Path, device: str) -> Path:
    folder = results / "-".join(re.findall(r"[a-z0-9.]+", device.lower()))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.date.today().isoformat()}.json"


if __name__ == "__main__":
    main()
