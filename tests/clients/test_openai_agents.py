"""A program of OpenAI's Agents SDK behind which the policy stands, unchanged."""

import sys
from pathlib import Path

import pytest
import torch

from rollout_engine import Agent, SamplingParams

pytest.importorskip("agents")

PROGRAM = str(Path(__file__).parents[2] / "examples" / "agent_sdk.py")


def test_its_runs_are_rows_and_the_same_again_at_a_seed(policy):
    agent = Agent([sys.executable, PROGRAM], reward=lambda output: float(len(output)))
    tasks = [{"sum": "1+2"}, {"sum": "30+4"}]
    params = SamplingParams(
        max_tokens=64, logit_bias={policy.tokenizer.eos_token_id: 8.0}
    )  # cut answers are errors there
    first, second = (policy.rollout(tasks, params, env=agent, num_samples=2, seed=5, use_tqdm=False) for _ in range(2))
    assert list(first["error"]) == [None] * len(first) and (first["num_turns"] >= 1).all()
    assert torch.equal(first["tokens", "full"], second["tokens", "full"])
    assert {messages[0]["content"] for messages in first["messages"]} == {"1+2", "30+4"}
