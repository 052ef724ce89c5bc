"""Cost of `return_support`: the same prompts with it and without, taking turns, in one engine.

    python tests/benchmarks/supports.py

M has random weights, whose distributions are flat: at top-p 0.9 a support has most of the vocabulary. That is the worst
case; temperature 0.1 stands for a model that was trained. Figures are CPU seconds of the process, all threads together,
of steps that draw the same tokens, and ratios are medians over rounds.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from prompts import FreshPrompts
from works import KV_POOL_BYTES, SHAPES, write_config

from rollout_engine import LLM, SamplingParams

NUM_ROUNDS, NUM_PROMPT_TOKENS, NUM_TOKENS = 5, 16, 32
RULES = {
    "top_p=0.9": dict(top_p=0.9),
    "top_p=0.9, temperature=0.1": dict(top_p=0.9, temperature=0.1),
    "top_p=0.9, top_k=20": dict(top_p=0.9, top_k=20),
    "none": {},
}


def main(shape: str = "M", num_sequences: int = 32) -> None:
    """Print one row for each rule."""
    prompts = FreshPrompts(SHAPES[shape]["vocab_size"]).draw(num_sequences, NUM_PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = str(write_config(Path(directory, shape), shape))
        options = dict(load_format="dummy", dtype=SHAPES[shape]["dtype"], num_threads=1, kv_cache_bytes=KV_POOL_BYTES)
        with LLM(checkpoint, **options, skip_tokenizer_init=True, log_stats=False) as llm:
            print(f"{shape}, {num_sequences} sequences: rules | ids of a support | CPU ms of a token | with it | ratio")
            for name, rules in RULES.items():
                print(f"{name} | " + " | ".join(measured(llm, prompts, rules)), flush=True)


def measured(llm: LLM, prompts: list[list[int]], rules: dict[str, float]) -> list[str]:
    """Ids of a support, CPU milliseconds of a token without it and with it, and their ratio."""
    plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, logprobs=0, detokenize=False, **rules)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_ids = 0.0
    for round in range(NUM_ROUNDS + 1):  # the first warms up
        for asks in (False, True) if round % 2 else (True, False):
            start = time.process_time()
            outputs = llm.generate(prompts, plain.clone(return_support=asks), use_tqdm=False)
            if round:
                seconds[asks].append((time.process_time() - start) / (len(prompts) * NUM_TOKENS) * 1e3)
            if asks:
                num_ids = float(np.mean([output.outputs[0].support[0][-1] / NUM_TOKENS for output in outputs]))
    ratio = statistics.median(w / p for p, w in zip(seconds[False], seconds[True], strict=True))
    without, with_it = (statistics.median(seconds[asks]) for asks in (False, True))
    return [f"{num_ids:.1f}", f"{without:.3f}", f"{with_it:.3f}", f"{ratio:.3f}"]


if __name__ == "__main__":
    main()
