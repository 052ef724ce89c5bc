"""OpenEnv's probe of what an endpoint can return."""

import pytest

pytest.importorskip("openenv")

from openenv.core.harness.capture.validate_llm import require_llm, validate_llm  # noqa: E402

CLIENT = "openenv"


def test_the_probe_reaches_level_tokens(url):
    report = validate_llm(url, "tiny", provider="vllm")
    assert (report.ok, report.capture_level, report.rollout_type) == (True, "tokens", "train")
    assert report.logprobs_mode == "processed" and report.served_models == ["tiny"]
    assert report.n_prompt_ids > 0 and 0 < report.n_completion_ids <= 8
    assert report.param_fixes == [] and report.tool_support != "rejected"
    assert not [finding for finding in report.findings if "FATAL" in finding]


def test_a_training_run_may_require_it(url):
    assert require_llm(f"{url}/v1", "tiny", require_tokens=True).trainable
