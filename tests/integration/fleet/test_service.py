"""`RolloutService` over processes of this machine. What needs no process is in tests/unit/fleet/test_service.py."""

import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from rollout_engine import LLM, GenerateTimeoutError, RolloutService, SamplingParams, make_rollout_service
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers

pytestmark = pytest.mark.slow
OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1)
PROMPTS = ["The capital", {"messages": [{"role": "user", "content": "hi"}]}, [5, 6, 7], {"prompt_token_ids": [9]}] * 4
PARAMS = [
    SamplingParams(n=2, seed=3, max_tokens=60, logprobs=2, presence_penalty=0.5, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=60, top_p=0.9, stop=["e", "\x04"], logprobs=0),
    SamplingParams(n=3, seed=5, max_tokens=60, min_tokens=30, stop_token_ids=list(range(90, 100)), logprobs=0),
    SamplingParams(seed=6, max_tokens=60, temperature=0.0, logprobs=0, bad_words=["a"], logprobs_mode="processed"),
] * 4
LONG = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def service(checkpoint):
    leftovers = Leftovers()
    with RolloutService.from_pretrained(checkpoint, num_replicas=2, verbose=False, **OPTIONS) as made:
        yield made
    leftovers.assert_none()


def said(outputs):
    """Everything about outputs that does not depend on which engine computed them, and when."""
    return [
        (
            output.prompt,
            output.prompt_token_ids,
            [
                (
                    each.text,
                    list(each.token_ids),
                    [float(x).hex() for x in each.logprobs],
                    each.finish_reason,
                    each.stop_reason,
                    each.seed,
                )
                for each in output.outputs
            ],
        )
        for output in outputs
    ]


def all_serve(service):
    while any(each.state not in ("SYNCED", "DEAD") for each in service.health()):
        time.sleep(0.05)


def test_results_are_those_of_an_llm_in_text_tokens_and_bits(service, checkpoint):
    with LLM(checkpoint, log_stats=False, **OPTIONS) as llm:
        expected = said(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert said(service.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert said(asyncio.run(service.agenerate(PROMPTS, PARAMS, timeout_seconds=300))) == expected
    for index in (0, 1):
        assert said(service.generate(PROMPTS, PARAMS, use_tqdm=False, replica_index=index)) == expected


def test_a_replica_that_is_stopped_does_not_delay_a_deadline_and_loses_what_was_aborted(service):
    all_serve(service)
    pid = service.health()[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(GenerateTimeoutError, match="2 of 2 requests had not ended after 0.5 s"):
            service.generate([[5], [6]], LONG, use_tqdm=False, replica_index=0, timeout_seconds=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    all_serve(service)
    while service.get_num_unfinished_requests():
        time.sleep(0.05)
    assert service.get_cache_usage() == 0.0


def test_weights_change_at_every_replica_while_requests_run(service):
    all_serve(service)
    outputs = []
    params = LONG.clone(max_tokens=1500)
    run = threading.Thread(target=lambda: outputs.extend(service.generate([[5], [6], [7]], params, use_tqdm=False)))
    run.start()
    while not service.get_num_unfinished_requests():
        time.sleep(0.005)
    report = service.update_weights(tiny_model(seed=5).state_dict())
    run.join()
    assert sorted(report.replicas) == [0, 1]
    assert {span.policy_version for output in outputs for span in output.outputs[0].version_spans} >= {report.version}
    digests = service.collective_rpc("get_weight_digest")
    assert list(digests) == [0, 1] and digests[0] == digests[1]


def test_a_session_moves_when_its_replica_is_killed(service):
    all_serve(service)
    one = SamplingParams(max_tokens=4, ignore_eos=True)

    def turns():
        before = service.get_balancer_stats().decisions.get("session", 0)
        for turn in range(4):
            service.generate([[5, 6, 7, turn]], one, use_tqdm=False, session_id="s")
        return service.get_balancer_stats().decisions.get("session", 0) - before

    assert turns() == 3
    assert turns() == 4
    for index in (0, 1):  # one of them is the session's home
        os.kill(service.health()[index].pid, signal.SIGKILL)
        while service.health()[index].state == "SYNCED":
            time.sleep(0.01)
        assert turns() >= 3
        all_serve(service)
    assert turns() == 4


def test_two_services_in_one_process_are_apart(service, checkpoint):
    all_serve(service)
    leftovers = Leftovers()
    one = SamplingParams(max_tokens=8, seed=1)
    with make_rollout_service(checkpoint, num_replicas=1, verbose=False, **OPTIONS) as other:
        version = service.policy_version
        other.update_weights(tiny_model(seed=9).state_dict())
        assert (service.policy_version, other.policy_version) == (version, 1)
        before = said(service.generate("a", one.clone(logprobs=0), use_tqdm=False))
        assert said(other.generate("a", one.clone(logprobs=0), use_tqdm=False)) != before
    leftovers.assert_none()
    assert said(service.generate("a", one.clone(logprobs=0), use_tqdm=False)) == before


def test_the_page_s_code_runs(checkpoint, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(from rollout_engine import RolloutService.*?)^```", page, re.M | re.S)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    exec(code.replace("path/or/hub-id", str(checkpoint)), {"trainer": tiny_model()})
