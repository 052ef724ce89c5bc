"""Recipes of Tinker's cookbook, unmodified but for the address: one shows answers, one rewards sampled ones.

The server runs in another environment, whose Python is $ROLLOUT_ENGINE_PYTHON. Data sets and the model are directories
below the one in which the recipes run, under their names on the hub: nothing is loaded from there.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("tinker_cookbook")

OURS = os.environ.get("ROLLOUT_ENGINE_PYTHON", sys.executable)
MODEL, DATA = "Qwen/Qwen3-8B-Base", "HuggingFaceH4/no_robots"
MAKE = f"from rollout_engine.testing import tiny_checkpoint; tiny_checkpoint('{MODEL}', std=0.2)"
SERVE = ("-m", "rollout_engine", "serve", MODEL, "--served-model-name", MODEL, "--tinker", "saved", "--port", "0")
OPTIONS = ("dtype=float32", "max_model_len=512", "log_stats=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cookbook")
    subprocess.run([OURS, "-c", MAKE], check=True, cwd=made)
    data = made / DATA
    data.mkdir(parents=True)
    rows = [
        [{"role": "user", "content": f"What is {x} + {y}?"}, {"role": "assistant", "content": str(x + y)}]
        for x in range(0, 101, 3)
        for y in range(0, 101, 5)
    ]
    data.joinpath("train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def url(folder):
    with subprocess.Popen([OURS, *SERVE, *OPTIONS], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(line.split()[0] for line in server.stdout if line.startswith("http"))
        finally:
            server.terminate()


def run(folder, url, recipe, *options):
    """The metrics of a recipe's steps."""
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"}
    log_path = folder / "logs" / recipe
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log_path}", *options]
    subprocess.run(command, check=True, cwd=folder, env=environment, timeout=1800)
    return [json.loads(line) for line in log_path.joinpath("metrics.jsonl").read_text().splitlines()]


def test_shown_answers_and_then_rewarded_ones_are_learned(folder, url):
    options = (f"model_name={MODEL}", "batch_size=16", "learning_rate=1e-2", "lora_rank=32", "save_every=0")
    shown = run(folder, url, "sl_loop", *options)
    losses = [step["train_mean_nll"] for step in shown]
    assert len(losses) > 40 and losses[-1] < 0.5 * losses[0]
    [*_, last] = folder.joinpath("logs", "sl_loop", "checkpoints.jsonl").read_text().splitlines()
    options = (
        *(f"model_name={MODEL}", "env=arithmetic", f"load_checkpoint_path={json.loads(last)['state_path']}"),
        *("groups_per_batch=16", "group_size=8", "max_tokens=16", "learning_rate=3e-3", "lora_rank=32"),
        *("max_steps=20", "eval_every=0", "save_every=0", "renderer_name=role_colon"),
    )
    rewarded = run(folder, url, "math_rl.train", *options)
    rewards = [step["env/all/reward/total"] for step in rewarded if "env/all/reward/total" in step]
    assert {step["optim/kl_sample_train_v1"] for step in rewarded if "optim/kl_sample_train_v1" in step} == {0.0}
    assert len(rewards) == 20 and sum(rewards[-5:]) > sum(rewards[:5])
