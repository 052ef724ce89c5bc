"""What the parts of the device benchmark share: the engine, requests through it, the device's clock."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout_engine import LLM, SamplingParams
from tests.benchmarks.gpu_shapes import Requests

ENGINE = dict(
    device="cuda", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, log_stats=False,
    max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=16384,
)  # fmt: skip


def generate(llm: LLM, requests: Requests, logprobs: bool) -> int:
    """Number of tokens sampled."""
    asked: Any = [
        SamplingParams(
            temperature=0.6, max_tokens=n, logprobs=0 if logprobs else None, ignore_eos=True, detokenize=False
        )
        for n in requests.num_sampled
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests.prompts], asked, use_tqdm=False)
    failed = [output.outputs[0].error for output in outputs if output.outputs[0].error]
    if failed:
        raise RuntimeError(failed[0])
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def seconds_of(run: Callable[[], Tensor | None], repeats: int = 20) -> float:
    """Mean of runs one after the other, on the device's clock."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats
