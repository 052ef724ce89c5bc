"""examples/torchrl_grpo.py learns, with the engine in this process or its own, and agrees with the trained model."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl.modules.llm")

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # as for the command `python examples/NAME.py`

SHORT = ["--learning-rate", "1e-4", "--steps", "6"]

# TorchRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def run(out, *arguments):
    return importlib.import_module("torchrl_grpo").main([*arguments, "--out", str(out)])


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run that is just long enough to see it learn: its folder and its metrics."""
    out = tmp_path_factory.mktemp("torchrl_grpo")
    return out, run(out, *SHORT, "--warm-up-steps", "150")


def test_it_learns_within_six_steps_and_its_log_probs_are_the_engines(short_run):
    out, rows = short_run
    assert [row["step"] for row in rows] == list(range(7))
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 7
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == rows
    assert (out / "learning_curve.png").exists()


def test_an_engine_in_a_process_of_its_own_gives_the_same_run(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--own-process")
    for row, expected in zip(rows, short_run[1], strict=True):
        assert {**row, "step_seconds": 0} == {**expected, "step_seconds": 0}


def test_without_exact_log_probs_it_learns_and_they_are_close(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--plain")
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    assert all(0 < row["max_logprob_diff"] < 1e-3 for row in rows)


def test_it_learns_nothing_where_rewards_are_shuffled(short_run, tmp_path):
    rows = run(tmp_path, *SHORT, "--model", str(short_run[0] / "policy"), "--shuffle-rewards")
    assert max(row["accuracy"] for row in rows) < rows[0]["accuracy"] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_the_task(seed, tmp_path):
    rows = run(tmp_path, "--seed", str(seed))
    assert rows[0]["accuracy"] < 0.45 and rows[-1]["accuracy"] > 0.85
    assert max(row["max_logprob_diff"] for row in rows) == 0.0
