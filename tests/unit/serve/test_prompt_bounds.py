"""Log-probs of prompts are bounded over the whole answer, not only for each prompt."""

import pytest

from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROB_VALUES
from rollout_engine.serve import prompt_bounds

LONG = list(range(3, 203))
SCORED = {
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 60,
}


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": [LONG] * 330, "prompt_logprobs": -1}),
        ("/v1/completions", {"prompt": LONG, "prompt_logprobs": -1, "n": 330}),
        ("/v1/completions", {"prompt": [LONG] * 300, "echo": True, "logprobs": 0, "n": 300}),
        ("/generate", {"input_ids": [LONG] * 1400, **SCORED}),
    ],
)
def test_prompts_whose_log_probs_are_too_many_together_are_refused_before_any_is_queued(client, policy, path, body):
    steps = policy.get_metrics().core.counters.num_steps
    error = client.problem(path, body | ({"max_tokens": 1} if path.startswith("/v1") else {}))
    assert error["param"] == "prompt_logprobs" and f"at most {MAX_PROMPT_LOGPROB_VALUES} log-probs" in error["message"]
    assert "have 1" in error["message"] and "Send fewer prompts a call" in error["message"]
    assert policy.get_num_unfinished_requests() == 0
    assert policy.get_metrics().core.counters.num_steps == steps


def test_the_bound_is_the_sum_over_prompts_choices_and_likely_tokens(client, monkeypatch):
    monkeypatch.setattr(prompt_bounds, "MAX_PROMPT_LOGPROB_VALUES", 36)
    body = {"prompt": [[5, 6, 7], [8, 9, 10]], "prompt_logprobs": 3, "n": 2, "max_tokens": 1}
    choices = client.post("/v1/completions", body)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 3, 3]
    error = client.problem("/v1/completions", {**body, "prompt": [[5, 6, 7], [8, 9, 10, 11]]})
    assert "prompt_logprobs=3" in error["message"] and "have 42 log-probs together" in error["message"]
    one = {**body, "prompt": [5, 6, 7]}
    client.post("/v1/completions", {**one, "n": 4})
    assert "The tokens of the prompt" in client.problem("/v1/completions", {**one, "n": 5})["message"]
    assert client.problem("/v1/completions", {**one, "prompt": [-1]})["message"].startswith("prompt_token_ids[0]")
    message = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 9, "n": 4, "max_tokens": 1}
    assert len(client.post("/v1/chat/completions", message)["prompt_logprobs"]) > 36 // 9, "there they are written once"
