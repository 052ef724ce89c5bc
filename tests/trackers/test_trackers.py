"""The trackers with their real packages, without a network. `make test-trackers` runs it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason="needs the packages of all trackers"
)

LOG = """
import sys
from rollout_engine import StepLog

with StepLog(sys.argv[1], trackers=["tensorboard", "wandb", "trackio", "mlflow"]) as steps:
    steps(**{"loss": 0.5, "reward/mean": 1.0})
    steps(**{"loss": 0.25, "reward/mean": float("nan")})
    assert len(steps._trackers) == 4, "one has failed"
"""
READ = """
import json, sys
from pathlib import Path

run = Path(sys.argv[1])
found = {}

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(str(run))
events.Reload()
found["tensorboard"] = [(each.step, each.value) for each in events.Scalars("loss")]

import mlflow

client = mlflow.MlflowClient(f"sqlite:///{run}/mlflow.db")
[experiment] = client.search_experiments(filter_string="name = 'rollout-engine'")
[logged] = client.search_runs([experiment.experiment_id])
assert (logged.info.status, logged.info.run_name) == ("FINISHED", "run")
found["mlflow"] = [(each.step, each.value) for each in client.get_metric_history(logged.info.run_id, "loss")]

import os, sqlite3

with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "rollout-engine.db") as database:
    rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
found["trackio"] = [(step, json.loads(metrics)["loss"]) for step, metrics in rows]

[offline] = (run / "wandb").glob("offline-run-*")
found["wandb"] = [path.stat().st_size > 0 for path in offline.glob("*.wandb")]
print(json.dumps(found))
"""


def test_every_tracker_has_the_steps_without_a_network(tmp_path):
    """In processes of their own: the packages read the environment when they are imported."""
    nobody = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), nobody)
    here = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment = os.environ | proxies | here
    printed = ""
    for program in (LOG, READ):
        command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    found = json.loads(printed.splitlines()[-1])
    assert found.pop("wandb") == [True]
    assert found == dict.fromkeys(("tensorboard", "mlflow", "trackio"), [[0, 0.5], [1, 0.25]])
