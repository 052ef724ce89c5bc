"""The example that trains over replicas on Ray."""

import json
import sys

import pytest

from tests.ray.conftest import ROOT, assert_nothing_left, start_command


@pytest.mark.slow
def test_the_example_trains_over_replicas_on_ray(place, tmp_path):
    options = ["--warm-up-steps", "50", "--steps", "2", "--verify", "--out", str(tmp_path)]
    with start_command(place, [sys.executable, str(ROOT / "examples" / "grpo_ray.py"), *options]) as program:
        output, _ = program.communicate(timeout=900)
    assert program.returncode == 0, output
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["max_logprob_diff"] for row in rows] == [0.0] * 3
    assert set(rows[0]["staleness"]) == {"0"} and "1" in rows[-1]["staleness"]
    assert_nothing_left(place)
