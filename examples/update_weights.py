"""Change the weights of an engine in another process while it generates: by each transport, and from files.

python examples/update_weights.py                             a tiny random model, made on the spot
python examples/update_weights.py --model path/to/checkpoint
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

import sync
from rollout_engine import AsyncLLM, SamplingParams, testing


async def run(model: str, store: str) -> None:
    """One request, five updates; then the policy version of each of its tokens, as spans."""
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    async with AsyncLLM(model) as engine:

        async def generate() -> str:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=512, ignore_eos=True)):
                spans = output.outputs[0].version_spans
            return ", ".join(f"[{span.start}, {span.end}) by {span.policy_version}" for span in spans)

        request = asyncio.create_task(generate())
        for transport in ("shm", "store", "gloo"):
            with torch.no_grad():
                trainer.get_input_embeddings().weight.mul_(0.99)  # in a trainer: optimizer.step()
            print(f"{transport}: {await engine.update_weights(trainer, transport=transport, kv='recompute')}")
        version = engine.policy_version + 1
        sync.publish(store, trainer, version)
        print(f"published store: {await engine.update_weights(store)}")
        print(f"checkpoint: {await engine.update_weights(model)}")
        print(f"tokens: {await request}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Update the weights of an engine in every way.")
    parser.add_argument("--model", help="checkpoint directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or str(testing.tiny_checkpoint(f"{directory}/model"))
        asyncio.run(run(model, f"{directory}/store"))


if __name__ == "__main__":
    main()
