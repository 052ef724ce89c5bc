"""examples/grpo_lora.py learns with an adapter alone, and agrees with the trainer."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("reasoning_gym")

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # as for the command `python examples/NAME.py`

# Of what peft and transformers use of each other.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def run(out, *arguments):
    return importlib.import_module("grpo_lora").main([*arguments, "--out", str(out)])


def test_it_learns_within_eight_steps_and_its_log_probs_are_the_engines(tmp_path):
    rows = run(tmp_path, "--steps", "8", "--warm-up-steps", "150")
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 9
    assert rows[0]["kl"] == 0.0 < rows[-1]["kl"]  # an adapter begins as the base, whose log-probs are the reference
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.05
    arguments = ("--steps", "8", "--model", str(tmp_path / "policy"), "--shuffle-advantages")
    control = run(tmp_path, *arguments)
    assert control[0]["accuracy"] == rows[0]["accuracy"]
    assert control[-1]["accuracy"] < rows[-1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_the_task(seed, tmp_path):
    rows = run(tmp_path, "--seed", str(seed))
    assert rows[0]["accuracy"] < 0.45 and rows[-1]["accuracy"] > 0.85
