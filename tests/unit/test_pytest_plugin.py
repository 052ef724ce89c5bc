"""The fixtures that users' tests take from the plug-in of pytest, and the page that shows them."""

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from transformers import AutoModelForCausalLM

from rollout_engine import SamplingParams
from rollout_engine.testing.pytest_plugin import (  # noqa: F401
    rollout_checkpoint,
    rollout_options,
    rollout_policy,
    rollout_server,
)

ROOT = Path(__file__).parents[2]


def test_a_policy_is_made_for_each_test_and_takes_weights(rollout_policy, rollout_checkpoint):  # noqa: F811
    batch = rollout_policy.rollout(["2 + 2 ="], SamplingParams(max_tokens=3, seed=1), num_samples=2, use_tqdm=False)
    assert batch.batch_size == (2,) and rollout_policy.policy_version == 0
    trainer = AutoModelForCausalLM.from_pretrained(rollout_checkpoint)
    assert rollout_policy.update_weights(trainer).version == 1


def test_its_server_answers_from_the_same_policy(rollout_server, rollout_policy):  # noqa: F811
    assert rollout_policy.policy_version == 0
    asked = {"model": "default", "prompt": "2 + 2 =", "max_tokens": 3, "seed": 1}
    answer = httpx2.post(f"{rollout_server.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert rollout_policy.get_metrics().core.counters.num_tokens_sampled == 3


@pytest.mark.slow
def test_the_tests_of_the_page_pass_in_a_project_of_their_own(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "ci.md").read_text(), re.MULTILINE | re.DOTALL)
    conftest, *tests = blocks
    (tmp_path / "conftest.py").write_text(conftest)
    for i, text in enumerate(tests[:2]):
        (tmp_path / f"test_{i}.py").write_text(text)
    last = f"{tests[2]}\n\ndef test_model(rollout_policy):\n    assert rollout_policy\n"
    (tmp_path / "test_last.py").write_text(last)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    done = subprocess.run([*command, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
