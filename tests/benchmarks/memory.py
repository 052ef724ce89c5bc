"""Resident memory of a process that runs a work, beyond what cannot be avoided.

python tests/benchmarks/memory.py DIRECTORY DTYPE PROMPTS SAMPLES PROMPT_TOKENS SAMPLED_TOKENS

In a process of its own: import torch and transformers, note the size; load, run the work, note the peak. The weights
and a KV pool just large enough for the work are taken off; packed copies of weights are not. Then again after updates;
the peak is that before them.
"""

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

_BASELINE_BYTES = psutil.Process().memory_info().rss

from prompts import FreshPrompts  # noqa: E402

import rollout_engine  # noqa: E402
from rollout_engine.cli.ceilings import Dimensions, Work  # noqa: E402
from rollout_engine.model.loading.loader import find_geometry  # noqa: E402

_BLOCK = 16


def measure(directory: Path, dtype: str, work: Work) -> dict[str, Any]:
    """Megabytes (1e6 bytes) of a fresh process."""
    command = [sys.executable, __file__, str(directory), dtype, *map(str, work)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _run(directory: str, dtype: str, work: Work) -> dict[str, float]:
    config = transformers.AutoConfig.from_pretrained(directory)
    dims = Dimensions.of(*find_geometry(directory, getattr(torch, dtype)), getattr(torch, dtype))
    num_blocks = work.num_prompts * -(-work.num_prompt_tokens // _BLOCK)
    num_blocks += work.num_sequences * (1 + -(-work.num_sampled_tokens // _BLOCK))
    options = dict(load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=num_blocks, log_stats=False)
    params = rollout_engine.SamplingParams(
        n=work.num_samples, max_tokens=work.num_sampled_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = FreshPrompts(config.vocab_size)
    with rollout_engine.LLM(directory, dtype=dtype, **options) as llm:
        for _ in range(2):
            llm.generate(prompts.draw(work.num_prompts, work.num_prompt_tokens), params, use_tqdm=False)
        after = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for _ in range(2):
            llm.update_weights(_source(config, dims.dtype))
            llm.generate(prompts.draw(work.num_prompts, work.num_prompt_tokens), params, use_tqdm=False)
        after_update = psutil.Process().memory_info().rss
    num_embeddings = 1 if config.tie_word_embeddings else 2
    weights = (sum(map(math.prod, dims.layers)) + num_embeddings * math.prod(dims.head)) * dims.dtype.itemsize
    pool = num_blocks * _BLOCK * dims.kv_bytes_per_token
    taken_off = _BASELINE_BYTES + weights + pool
    return {
        "beyond_mb": round((after - taken_off) / 1e6, 1),
        "after_update_beyond_mb": round((after_update - taken_off) / 1e6, 1),
        "peak_beyond_mb": round((peak - taken_off) / 1e6, 1),
        "baseline_mb": round(_BASELINE_BYTES / 1e6, 1),
        "weights_mb": round(weights / 1e6, 1),
        "kv_pool_mb": round(pool / 1e6, 1),
    }


def _source(config: transformers.PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights that take no memory: each is one number, over and over."""
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    state = module.state_dict(keep_vars=True)
    numbers = {id(tensor): torch.tensor(0.01, dtype=dtype) for tensor in state.values()}
    return {name: numbers[id(tensor)].expand(tensor.shape) for name, tensor in state.items()}


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], sys.argv[2], Work(*map(int, sys.argv[3:])))))
