"""What `quantization="int8"` gains and costs: engines of one model in turns, in one process by one thread.

Rates are sampled tokens for each CPU second, which other processes disturb less than the clock; the KV of the prompts
is known. Differences are those of the log-probs of sampled tokens from `score` of the engine that rounds nothing.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from prompts import FreshPrompts
from works import KV_POOL_BYTES

from rollout_engine import LLM, RequestOutput, SamplingParams

BATCHES = (1, 8, 64)
"""Sequences that are sampled at once."""
DTYPES = ("float32", "bfloat16")
_NUM_PROMPT_TOKENS, _NUM_SAMPLED_TOKENS = 64, 32


class Engines:
    """One model in each of `DTYPES`, as it is and with int8 codes: by dtype and "int8", or dtype and "exact"."""

    def __init__(self, directory: Path) -> None:
        self._llms = {
            (dtype, kind): LLM(
                str(directory),
                dtype=dtype,
                quantization="int8" if kind == "int8" else None,
                load_format="dummy",
                skip_tokenizer_init=True,
                kv_cache_bytes=KV_POOL_BYTES // 2,
                log_stats=False,
                num_threads=1,
            )
            for dtype in DTYPES
            for kind in ("exact", "int8")
        }

    def rates(self, num_sequences: int, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
        """Tokens for each CPU second, medians, and the ratios of one round; the first round warms up."""
        params = SamplingParams(max_tokens=_NUM_SAMPLED_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        measured: dict[tuple[str, str], list[float]] = {key: [] for key in self._llms}
        for number in range(rounds + 1):
            asked = prompts.draw(num_sequences, _NUM_PROMPT_TOKENS)
            for key in [*measured] if number % 2 else [*measured][::-1]:
                seconds = self._seconds(self._llms[key], asked, params)
                measured[key].append(num_sequences * _NUM_SAMPLED_TOKENS / seconds)
        rates = {key: values[1:] for key, values in measured.items()}
        figure: dict[str, Any] = {
            f"{dtype} {kind}, tokens per CPU second": round(statistics.median(values), 1)
            for (dtype, kind), values in rates.items()
        }
        for dtype in DTYPES:
            ratios = [a / b for a, b in zip(rates[dtype, "int8"], rates[dtype, "exact"], strict=True)]
            figure[f"{dtype} int8 / exact"] = round(statistics.median(ratios), 3)
            figure[f"{dtype} rounds"] = [round(ratio, 3) for ratio in ratios]
        return figure

    def differences(self, dtype: str, prompts: FreshPrompts) -> dict[str, float]:
        """Between log-probs sampled with int8 codes and those of the same tokens without."""
        params = SamplingParams(max_tokens=_NUM_SAMPLED_TOKENS, ignore_eos=True, logprobs=0, detokenize=False, seed=1)
        asked = prompts.draw(BATCHES[-1], _NUM_PROMPT_TOKENS)
        answers = self._llms[dtype, "int8"].generate(asked, params, use_tqdm=False)
        scored = self._llms[dtype, "exact"].score(asked, [each.outputs[0].token_ids for each in answers])
        apart = np.abs(np.concatenate(scored) - np.concatenate([_logprobs(each) for each in answers]))
        return {
            "num_tokens": len(apart),
            "largest": round(float(apart.max()), 4),
            "mean": round(float(apart.mean()), 5),
            "share_of_equal_bits": round(float((apart == 0).mean()), 4),
        }

    def megabytes(self, dtype: str) -> dict[str, float]:
        """Of the weights that the engine was given, and of the codes beside them."""
        usage: Any = self._llms[dtype, "int8"].collective_rpc("get_memory_usage")[0]
        return {"weights": round(usage["weights"] / 1e6, 1), "codes": round(usage["derived"] / 1e6, 1)}

    def close(self) -> None:
        """Free them."""
        for llm in self._llms.values():
            llm.shutdown()

    def _seconds(self, llm: LLM, asked: list[list[int]], params: SamplingParams) -> float:
        llm.reset_prefix_cache()
        llm.generate(asked, SamplingParams(max_tokens=1), use_tqdm=False)
        start = time.process_time()
        llm.generate(asked, params, use_tqdm=False)
        return time.process_time() - start


def _logprobs(answer: RequestOutput) -> np.ndarray:
    found = answer.outputs[0].logprobs
    assert found is not None, "they were asked for"
    return np.asarray(found)
