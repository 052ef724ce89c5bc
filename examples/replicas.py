"""Two replicas of a model on this machine: generate, push weights, kill one in the middle of its work.

python examples/replicas.py                             a tiny random model, made on the spot
python examples/replicas.py --model path/to/checkpoint
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutService, SamplingParams, testing

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "2 + 2 =", "Dear"]
PARAMS = SamplingParams(n=4, seed=0, max_tokens=512, ignore_eos=True)
NUM_TOKENS = len(PROMPTS) * PARAMS.n * (PARAMS.max_tokens or 0)


def tokens(service: RolloutService) -> list[list[int]]:
    outputs = service.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def kill_half_way(service: RolloutService) -> None:
    """SIGKILL replica 0 once half of the tokens are sampled."""
    start = service.get_metrics().core.counters.num_tokens_sampled
    while service.get_metrics().core.counters.num_tokens_sampled < start + NUM_TOKENS // 2:
        time.sleep(0.005)
    replica = service.health()[0]
    os.kill(replica.pid, signal.SIGKILL)
    print(f"killed process {replica.pid} of replica 0 while it had {replica.num_unfinished_requests} requests")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Kill a replica, and see that nothing is lost.")
    parser.add_argument("--model", help="checkpoint directory or hub id")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or str(testing.tiny_checkpoint(directory))
        trainer = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        with RolloutService.from_pretrained(model, num_replicas=2, verbose=False) as service:
            before = tokens(service)
            with torch.no_grad():
                trainer.get_input_embeddings().weight.mul_(0.9)  # in a trainer: optimizer.step()
            report = service.update_weights(trainer)
            print(f"version {report.version} serves at replicas {sorted(report.replicas)} after {report.seconds:.2f} s")
            expected = tokens(service)
            print(f"the tokens are others than before: {expected != before}")
            killer = threading.Thread(target=kill_half_way, args=[service])
            killer.start()
            found = tokens(service)
            killer.join()
            print(f"{len(found)} samples of {len(expected)} came, their tokens the same: {found == expected}")
            while (replica := service.health()[0]).state != "SYNCED":
                time.sleep(0.1)
            print(f"replica 0 is back as process {replica.pid}, with version {replica.policy_version}")


if __name__ == "__main__":
    main()
