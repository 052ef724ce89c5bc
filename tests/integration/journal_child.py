"""Trainers in processes of their own, which end themselves by SIGKILL at one write of their journal.

    python -m tests.integration.journal_child <<< '{"kill_at": 7, ...}'

Each line of its input starts one, a fork of this process, and is answered by its exit status. The checkpoint of a
trainer is one file: the rows of all batches, the collector's state, and the version of the weights.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

from transformers import AutoModelForCausalLM

from envs_adapters.base import Observation
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.batches.jsonl import samples
from rollout_engine.rollouts.journal import journal
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.rollouts.policy import RolloutPolicy

OPTIONS = {"dtype": "float32", "num_kv_blocks": 256, "max_model_len": 128, "num_threads": 1}
PARAMS = SamplingParams(max_tokens=20, top_p=0.9, stop_token_ids=list(range(3, 20)))
ROWS = [{"prompt": f"prompt {i}", "answer": i} for i in range(8)]


class Adding:
    """Three turns; rewards are numbers of tokens."""

    def reset(self, seed):
        """Begin."""
        self.turn = 0
        return f"begin {seed}: "

    def step(self, action):
        """Count."""
        self.turn += 1
        return Observation(f" turn {self.turn}: ", float(len(action.token_ids)), terminated=self.turn == 3)


def reward(completion_ids, answer, **others):
    """A number per sample."""
    return [len(ids) / (1 + number) for ids, number in zip(completion_ids, answer, strict=True)]


def kill_at(number):
    """End this process at write `number` of its journal: before it, in its middle or behind it."""
    write_all, writes = journal.write_all, []

    def write(descriptor, data):
        writes.append(len(data))
        if len(writes) == number:
            if number % 3:
                write_all(descriptor, data if number % 3 == 1 else data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(descriptor, data)

    journal.write_all = write
    return writes


def save(path, checkpoint):
    """Write the checkpoint, whole or not at all."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps(checkpoint))
    made.replace(path)


def weights_of(model, version):
    """Weights that follow from the version, as of a trainer that is deterministic."""
    return {name: tensor * (1 + version / 64) for name, tensor in model.state_dict().items()}


def collect(policy, model, work, *, updates):
    """Train: a batch, an update, a checkpoint, and again."""
    path = work / "checkpoint.json"
    checkpoint = json.loads(path.read_text()) if path.exists() else {"rows": [], "state": None, "version": 0}
    if checkpoint["version"]:
        policy.update_weights(weights_of(model, checkpoint["version"]), version=checkpoint["version"])
    options = {"num_samples": 3, "groups_per_batch": 2, "seed": 5, "reward_fn": reward}
    kept = JournalOptions(directory=str(work / "journal"), progress_tokens=2)
    with policy.collect(ROWS, PARAMS, max_staleness=0 if updates else 2, journal=kept, **options) as collector:
        if checkpoint["state"] is None:
            save(path, checkpoint | {"state": collector.state_dict()})
        else:
            collector.load_state_dict(checkpoint["state"])
        for batch in collector:
            checkpoint["rows"] += samples(batch)
            checkpoint["state"] = collector.state_dict()
            if updates:
                checkpoint["version"] += 1
                policy.update_weights(weights_of(model, checkpoint["version"]), version=checkpoint["version"])
            save(path, checkpoint)
    return checkpoint["rows"], collector.stats.num_delivered


def main(given):
    """Run to the end, or to the kill; writes result.json."""
    work, verb = Path(given["work"]), given["verb"]
    writes = kill_at(given.get("kill_at", 0))
    with RolloutPolicy.from_pretrained(given["model"], **OPTIONS) as policy:
        if verb == "rollout":
            options = {"num_episodes": 2, "num_samples": 2, "seed": 5, "journal": work / "journal", "use_tqdm": False}
            rows, number = list(samples(policy.rollout(None, PARAMS, env=Adding, **options))), 0
        else:
            model = AutoModelForCausalLM.from_pretrained(given["model"])
            rows, number = collect(policy, model, work, updates=verb == "update")
    save(work / "result.json", {"rows": rows, "num_writes": len(writes), "num_delivered": number})


def run_forked(given):
    """The exit status of a trainer in a fork of this process; of a kill the negative signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        main(given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(run_forked(json.loads(line)), flush=True)
