"""Generate text with log-probs.

python examples/generate.py                             a tiny random model, made on the spot
python examples/generate.py --model Qwen/Qwen3-0.6B     a real checkpoint
"""

import argparse
import tempfile
from collections.abc import Sequence

from rollout_engine import LLM, SamplingParams, testing

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print two samples of each prompt."""
    parser = argparse.ArgumentParser(description="Generate text with log-probs.")
    parser.add_argument("--model", help="checkpoint directory or hub id")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or testing.tiny_checkpoint(directory)
        with LLM(str(model)) as llm:
            params = SamplingParams(n=2, temperature=0.8, max_tokens=options.max_tokens, seed=0, logprobs=0)
            for result in llm.generate(PROMPTS, params, use_tqdm=False):
                print(f"\n{result.prompt}")
                for sample in result.outputs:
                    print(f"  [{sample.cumulative_logprob:8.2f}, {sample.finish_reason}] {sample.text!r}")


if __name__ == "__main__":
    main()
