"""Examples learn with adapters alone, and agree with the trainer."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("reasoning_gym")

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # as for the command `python examples/NAME.py`

# Of what peft and transformers use of each other.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def run(out, *arguments, example="grpo_lora"):
    return importlib.import_module(example).main([*arguments, "--out", str(out)])


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


def two_policies(out, *arguments):
    """The rows of each policy of examples/grpo_two_policies.py."""
    rows = run(out, *arguments, example="grpo_two_policies")
    return rows[::2], rows[1::2]


def test_two_policies_learn_in_one_engine_and_their_log_probs_are_the_engines(tmp_path):
    each = two_policies(tmp_path, "--steps", "8", "--warm-up-steps", "150")
    assert [row["policy_version"] for row in each[0]] == list(range(3, 21, 2))
    for rows in each:
        assert [row["max_logprob_diff"] for row in rows] == [0.0] * 9
        assert rows[0]["kl"] == rows[0]["margin"] == 0.0 < rows[-1]["kl"]
        assert rows[-1]["accuracy"] > rows[0]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_policies_learn_the_task(seed, tmp_path):
    for rows in two_policies(tmp_path, "--seed", str(seed)):
        assert rows[0]["accuracy"] < 0.45 and rows[-1]["accuracy"] > 0.8
