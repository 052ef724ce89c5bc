"""The cost of a teacher's columns, for a teacher of the policy's size, as a share of the rollout's."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from works import KV_POOL_BYTES, MAX_MODEL_LEN

from rollout_engine import RolloutPolicy, SamplingParams, Teacher
from rollout_engine.cli.ceilings import Work

_TOP_K = 8


def measure(directory: Path, dtype: str, work: Work, rounds: int) -> dict[str, Any]:
    """`ratio`: seconds of the columns / seconds of the rollout, the median over rounds; the first of them warms up.

    `ratio_top_k`: with the teacher's eight most likely tokens, too.
    """
    options = dict(dtype=dtype, load_format="dummy", skip_tokenizer_init=True, kv_cache_bytes=KV_POOL_BYTES)
    options |= dict(max_model_len=MAX_MODEL_LEN, log_stats=False)
    params = SamplingParams(max_tokens=work.num_sampled_tokens, ignore_eos=True)
    ratios: dict[str, list[float]] = {"ratio": [], "ratio_top_k": []}
    seconds: list[float] = []
    with (
        RolloutPolicy.from_pretrained(directory, **options) as policy,
        Teacher(directory, seed=1, **options) as teacher,
    ):
        for index in range(rounds + 1):
            for name, top_k in (("ratio", None), ("ratio_top_k", _TOP_K)):
                given = dict(num_samples=work.num_samples, use_tqdm=False)
                times = []
                for teachers in ((), [teacher]):
                    policy.reset_prefix_cache()
                    own = np.random.default_rng(index)  # the same prompts with and without
                    asked = own.integers(3, 4000, (work.num_prompts, work.num_prompt_tokens)).tolist()
                    start = time.perf_counter()
                    more = dict(teachers=teachers, teacher_top_k=top_k) if teachers else {}
                    policy.rollout(asked, params, seed=index, **given, **more)
                    times.append(time.perf_counter() - start)
                if index:
                    ratios[name].append(times[1] / times[0] - 1)
                    seconds.append(times[0])
    return {name: round(statistics.median(each), 3) for name, each in ratios.items()} | {
        "rounds": [round(each, 3) for each in ratios["ratio"]],
        "rollout_seconds": round(statistics.median(seconds), 3),
    }
