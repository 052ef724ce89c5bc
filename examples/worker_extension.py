"""A worker extension of your own: norms of what every layer puts out, gathered during rollouts.

python examples/worker_extension.py [--model Qwen/Qwen3-0.6B]     without: a tiny random model, made on the spot
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from rollout_engine import RolloutPolicy, SamplingParams, testing
from worker_ext.base import WorkerExtension, rpc


class ActivationNorms(WorkerExtension):
    """Mean norm per layer, over all tokens computed since `start_norms`."""

    @rpc
    def start_norms(self) -> None:
        self.norms: dict[int, list[float]] = defaultdict(list)
        self.stop = self.worker.watch_layers(self.add)

    def add(self, layer: int, hidden: Tensor) -> None:
        self.norms[layer] += hidden.float().norm(dim=-1).tolist()

    @rpc
    def take_norms(self) -> list[float]:
        self.stop()
        return [sum(norms) / len(norms) for _, norms in sorted(self.norms.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per layer."""
    parser = argparse.ArgumentParser(description="Watch activation norms during rollouts.")
    parser.add_argument("--model", help="checkpoint directory or hub id")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or testing.tiny_checkpoint(directory)
        with RolloutPolicy.from_pretrained(model, worker_extensions=[ActivationNorms]) as policy:
            policy.collective_rpc("start_norms")
            policy.rollout(["The sky is", "2 + 2 ="], SamplingParams(max_tokens=32), num_samples=4, use_tqdm=False)
            for layer, norm in enumerate(policy.collective_rpc("take_norms")[0]):
                print(f"layer {layer:2}: mean norm {norm:8.3f}")


if __name__ == "__main__":
    main()
