"""Cost of KV from outside of the pool: a prompt that is computed, with and without a connector, and one that is loaded.

    python tests/benchmarks/kv_tiers.py

Two engines take turns, one without a connector. The pool of the other forgets its prefixes before the same prompt
comes again, so all of it but a block is loaded. Wall seconds of whole calls for one token; ratios are medians over
rounds. `shm` and `disk` verify a digest of each block when it is fetched.
"""

import statistics
import tempfile
import time
from pathlib import Path

from prompts import FreshPrompts
from transformers import AutoConfig
from works import KV_POOL_BYTES, SHAPES, write_config

from rollout_engine import LLM, SamplingParams

NUM_ROUNDS, NUM_PROMPT_TOKENS, TIER_BYTES = 7, 2048, 2 << 30
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
SETTLE_SECONDS = 0.3
"""Time that a writer thread gets before blocks are asked for; it is no part of a figure."""


def main(shape: str = "M") -> None:
    """Print one row for each tier."""
    prompts = FreshPrompts(SHAPES[shape]["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = str(write_config(Path(directory, shape), shape))
        config = AutoConfig.from_pretrained(checkpoint)
        config.max_position_embeddings = 2 * NUM_PROMPT_TOKENS
        config.save_pretrained(checkpoint)
        options = dict(load_format="dummy", dtype=SHAPES[shape]["dtype"], kv_cache_bytes=KV_POOL_BYTES)
        options |= dict(skip_tokenizer_init=True, log_stats=False)
        with LLM(checkpoint, **options) as plain:
            print(
                f"{shape}, {NUM_PROMPT_TOKENS} tokens: tier | computed s | with a tier | loaded s | loaded / computed"
            )
            for tier in ("host", "shm", f"disk:{directory}/blocks"):
                with LLM(checkpoint, **options, kv_connector=tier, kv_connector_bytes=TIER_BYTES) as tiered:
                    print(f"{tier.partition(':')[0]} | " + " | ".join(measured(plain, tiered, prompts)), flush=True)


def measured(plain: LLM, tiered: LLM, prompts: FreshPrompts) -> list[str]:
    """Seconds of a computed prompt; the ratio of that with a tier; seconds of a loaded one, and the ratio of these."""
    rows = []
    for round in range(NUM_ROUNDS + 1):  # the first warms up
        prompt = prompts.draw(1, NUM_PROMPT_TOKENS)
        if round % 2:
            computed, saved = seconds(plain, prompt), seconds(tiered, prompt)
        else:
            saved, computed = seconds(tiered, prompt), seconds(plain, prompt)
        time.sleep(SETTLE_SECONDS)
        assert tiered.reset_prefix_cache()
        rows.append((computed, saved, seconds(tiered, prompt, least_cached=NUM_PROMPT_TOKENS - 64)))
    computed, saved, loaded = (statistics.median(each) for each in zip(*rows[1:], strict=True))
    with_tier = statistics.median(b / a for a, b, _ in rows[1:])
    ratio = statistics.median(c / a for a, _, c in rows[1:])
    return [f"{computed:.3f}", f"{with_tier:.3f}", f"{loaded:.3f}", f"{ratio:.3f}"]


def seconds(llm: LLM, prompt: list[list[int]], *, least_cached: int = 0) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    (output,) = llm.generate(prompt, ONE, use_tqdm=False)
    end = time.perf_counter()
    assert output.num_cached_tokens >= least_cached, f"{output.num_cached_tokens} tokens were found"
    return end - start


if __name__ == "__main__":
    main()
