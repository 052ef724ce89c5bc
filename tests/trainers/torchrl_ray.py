"""A program that collects by TorchRL's RayLLMCollector and prints JSON: torchrl_ray.py CHECKPOINT ADDRESS."""

import functools
import json
import sys
import warnings

warnings.simplefilter("ignore")

from torchrl.collectors.llm import RayLLMCollector  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from envs_adapters.trainers.torchrl import EnginePolicy, EngineWeightSyncScheme  # noqa: E402
from tests.trainers.torchrl_runs import chat_env, ragged  # noqa: E402


def main(checkpoint, address):
    """Collect a batch, push weights, collect another: versions and lengths of both."""
    policy = EnginePolicy(address, generate_kwargs={"max_new_tokens": 4})
    collector = RayLLMCollector(
        env=functools.partial(chat_env, AutoTokenizer.from_pretrained(checkpoint)),
        policy=policy,
        dialog_turns_per_batch=8,
        total_dialog_turns=16,
        ray_init_config={"num_cpus": 2, "include_dashboard": False},
        remote_config={"num_cpus": 1},
        track_policy_version=True,
    )
    sync = EngineWeightSyncScheme(policy)
    sync.init_on_sender(model_id="policy", context=collector, model=AutoModelForCausalLM.from_pretrained(checkpoint))
    sync.register_collector(collector)
    seen = []
    for _ in range(2):
        rows = collector.next().reshape(-1)
        versions = {version for row in ragged(rows, "versions", "full") for version in row.tolist()}
        seen.append({"rows": len(rows), "versions": sorted(versions)})
        sync.connect() if not sync.synchronized_on_sender else sync.send()
    collector.shutdown()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
