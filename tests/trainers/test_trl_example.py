"""examples/trl_grpo.py learns, by either generation, and agrees with the trainer."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # as for the command `python examples/NAME.py`

SHORT = ["--learning-rate", "1e-4", "--steps", "6"]

# TRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def run(out, *arguments):
    return importlib.import_module("trl_grpo").main([*arguments, "--out", str(out)])


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run that is just long enough to see it learn: its folder and its metrics."""
    out = tmp_path_factory.mktemp("trl_grpo")
    return out, run(out, *SHORT, "--warm-up-steps", "150")


def test_it_learns_within_six_steps_and_its_log_probs_are_the_engines(short_run):
    out, rows = short_run
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 6
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == rows
    assert (out / "learning_curve.png").exists()


def test_without_exact_log_probs_it_learns_and_they_are_close(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--plain")
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    assert all(0 < row["max_logprob_diff"] < 1e-3 for row in rows)


def test_trls_own_generation_begins_at_the_same_policy_and_learns(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--generation", "trl")
    assert rows[0]["accuracy"] == short_run[1][0]["accuracy"]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    assert not any("max_logprob_diff" in row for row in rows)


def test_it_learns_nothing_where_rewards_are_shuffled(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--shuffle-rewards")
    assert max(row["accuracy"] for row in rows) < rows[0]["accuracy"] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["engine", "trl"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_the_task(seed, generation, tmp_path):
    rows = run(tmp_path, "--seed", str(seed), "--generation", generation)
    assert rows[0]["accuracy"] < 0.45 and rows[-1]["accuracy"] > 0.85
