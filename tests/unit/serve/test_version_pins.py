"""Policy versions that requests ask for, over HTTP: waited for, refused, or ended by an update."""

import threading
import time

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.testing import tiny_checkpoint

from .conftest import Client

CHAT = [{"role": "user", "content": "x"}]


def _of_sglang(ids, fields):
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 3, **fields}}


ROUTES = {
    "/v1/completions": lambda fields: {"prompt": [5, 6], "max_tokens": 3, **fields},
    "/v1/chat/completions": lambda fields: {"messages": CHAT, "max_tokens": 3, **fields},
    "/inference/v1/generate": lambda fields: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, **fields}},
    "/generate": lambda fields: _of_sglang([5, 6], fields),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Enough positions that an answer does not end before an update does it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("pinned"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def served(checkpoint):
    """A policy at version 3, and its client."""
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=20_000, num_kv_blocks=2600) as policy:
        policy.update_weights(checkpoint, version=3)
        yield policy, Client(App(policy))


@pytest.fixture
def client(served):
    return served[1]


def sampled(answer):
    """Why the only sample of an answer ended, its error, and the versions of its tokens."""
    if "meta_info" in answer:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        return reason["type"], reason.get("message"), {int(each["version"]) for each in meta["weight_versions"]}
    [choice] = answer["choices"]
    return choice["finish_reason"], choice.get("error"), {span[2] for span in choice["version_spans"]}


@pytest.mark.parametrize("path", ROUTES)
def test_the_live_version_serves_a_past_one_is_400_and_a_later_one_503_if_it_is_not_to_wait(served, path):
    policy, client = served
    live = policy.policy_version
    for pin in ({"policy_version": live}, {"min_policy_version": live - 1}):
        reason, error, versions = sampled(client.post(path, ROUTES[path](pin)))
        assert reason in ("stop", "length") and error is None and versions == {live}
    problem = client.problem(path, ROUTES[path]({"policy_version": live - 1}))
    assert f"policy_version={live - 1} is not allowed: must be at least {live}" in problem["message"]
    assert problem["param"] == "policy_version"
    later = ROUTES[path]({"min_policy_version": live + 1, "version_wait": "refuse"})
    response = client.send("POST", path, later)
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    ended = client.post(path, ROUTES[path]({"policy_version": live + 1, "version_wait": "end"}))
    reason, error, versions = sampled(ended)
    assert reason == "abort" and f"version {live} is live" in error and versions == set()


@pytest.mark.parametrize("path", ROUTES)
def test_a_later_version_is_waited_for_while_others_are_answered(served, checkpoint, path):
    policy, client = served
    live, found = policy.policy_version, []
    body = ROUTES[path]({"policy_version": live + 1})
    thread = threading.Thread(target=lambda: found.append(client.post(path, body)))
    thread.start()
    wait_until(lambda: policy.get_metrics().core.num_awaiting_version == 1)
    client.post("/v1/completions", {"prompt": [5], "max_tokens": 2})
    assert "rollout_engine_sequences_awaiting_version" in client.send("GET", "/metrics").text and not found
    policy.update_weights(checkpoint)
    thread.join()
    assert sampled(found[0])[2] == {live + 1}


def test_an_update_ends_a_pinned_answer_with_its_tokens_and_says_why(served, checkpoint):
    policy, client = served
    live, found = policy.policy_version, []
    body = {"prompt": [5], "max_tokens": 19_000, "ignore_eos": True, "policy_version": live, "n": 2}
    thread = threading.Thread(target=lambda: found.append(client.post("/v1/completions", body)))
    thread.start()
    wait_until(lambda: policy.get_metrics().core.num_running == 2)
    policy.update_weights(checkpoint)
    thread.join()
    for choice in found[0]["choices"]:
        assert choice["finish_reason"] == "abort" and f"version {live + 1} is live" in choice["error"]
        assert {span[2] for span in choice["version_spans"]} == {live}


def test_fields_that_do_not_fit_are_refused_by_name(client):
    for fields in ({"policy_version": -1}, {"min_policy_version": "new"}, {"version_wait": "never"}):
        assert client.problem("/v1/completions", {"prompt": "x", **fields})["param"] == next(iter(fields))
    both = {"prompt": "x", "policy_version": 9, "min_policy_version": 9}
    assert client.problem("/v1/completions", both)["param"] == "min_policy_version"


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)
