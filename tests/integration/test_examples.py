"""The examples run as they are, and the policy of examples/grpo.py learns because it is rewarded."""

import importlib.util
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["generate", "rollout"])
def test_short_examples_are_short(name):
    assert (EXAMPLES / f"{name}.py").read_text().count("\n") < 50


def test_generate_prints_every_prompt(capsys):
    example = load("generate")
    example.main([])
    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in example.PROMPTS)


def test_rollout_agrees_with_the_trainer_before_and_after_an_update(capsys):
    load("rollout").main([])
    printed = capsys.readouterr().out
    assert "policy 0: largest |log-prob difference| 0.0\n" in printed
    assert "policy 1: largest |log-prob difference| 0.0\n" in printed


def test_grpo_writes_its_record_and_agrees_with_the_trainer_at_every_step(tmp_path):
    load("grpo").main(["--steps", "2", "--warm-up-steps", "10", "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert set(row) == {"step", "reward", "accuracy", "tokens_per_second", "update_ms", "max_logprob_diff"}
        assert row["max_logprob_diff"] == 0.0
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {sample["policy_version"] for sample in samples} == {0, 1, 2}
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_grpo_trains_the_checkpoint_it_is_given(tmp_path):
    example = load("grpo")
    example.main(["--steps", "0", "--warm-up-steps", "10", "--out", str(tmp_path / "made")])
    checkpoint = str(tmp_path / "made" / "policy")
    rows = example.main(
        ["--model", checkpoint, "--steps", "1", "--micro-batch", "100", "--out", str(tmp_path / "given")]
    )
    assert [row["max_logprob_diff"] for row in rows] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_lifts_accuracy_from_below_45_to_above_90_percent(tmp_path, seed):
    rows = load("grpo").main(["--seed", str(seed), "--out", str(tmp_path)])
    assert rows[0]["accuracy"] < 0.45
    assert rows[-1]["accuracy"] > 0.9
    assert max(row["max_logprob_diff"] for row in rows) == 0.0


@pytest.mark.slow
def test_grpo_with_shuffled_advantages_learns_nothing(tmp_path):
    rows = load("grpo").main(["--shuffle-advantages", "--out", str(tmp_path)])
    assert max(row["accuracy"] for row in rows) < 0.5
