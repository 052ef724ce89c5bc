"""What was sampled and rewarded is returned, whatever becomes of its log."""

import asyncio
import errno

import pytest

from envs_adapters import Observation
from rollout_engine import RolloutPolicy, SamplingParams, read_jsonl, replay
from rollout_engine.rollouts import log as rollout_log
from rollout_engine.testing import tiny_checkpoint

PROMPTS = ["one", "another", "a third"]
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with RolloutPolicy.from_pretrained(checkpoint, dtype="float32", max_model_len=128) as policy:
        yield policy


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def lengths(completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_a_full_disk_costs_the_log_alone(policy, caplog):
    given = dict(num_samples=2, seed=3, reward_fn=lengths)
    whole = policy.rollout(PROMPTS, PARAMS, use_tqdm=False, **given)
    batch = policy.rollout(PROMPTS, PARAMS, use_tqdm=False, log_to="/dev/full", **given)
    assert batch["tokens", "full"].equal(whole["tokens", "full"])
    assert batch["next", "reward"].equal(whole["next", "reward"])
    [message] = warnings_of(caplog)
    assert message.startswith("log_to=/dev/full: group ") and "No space left on device" in message

    async def groups():
        return [batch async for batch in policy.arollout(PROMPTS, PARAMS, log_to="/dev/full", **given)]

    assert len(asyncio.run(groups())) == 3
    with policy.collect(PROMPTS, PARAMS, groups_per_batch=3, log_to="/dev/full", **given) as collector:
        assert [len(batch) for batch in collector] == [6]
    assert len(warnings_of(caplog)) == 3


def test_a_line_that_was_cut_off_spoils_itself_alone(policy, tmp_path, monkeypatch, caplog):
    append, calls = rollout_log.append_text, []

    def fills_up(path, text, **options):
        calls.append(text)
        if len(calls) == 2:
            append(path, text[:50], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text, **options)

    monkeypatch.setattr(rollout_log, "append_text", fills_up)
    policy.rollout(PROMPTS, PARAMS, seed=3, log_to=tmp_path / "log.jsonl", use_tqdm=False)
    samples = read_jsonl(tmp_path / "log.jsonl")
    assert len(calls) == 3 and len(samples) == 2
    assert all(report.is_equal for report in replay(policy, samples))
    assert sum("is missing" in message for message in warnings_of(caplog)) == 1


DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]
INFO = {"nan": float("nan"), "bytes": b"\xff", "set": {1}, "deep": DEEP, "type": object}


class Tells:
    def reset(self, seed):
        return "go"

    def step(self, action):
        return Observation(terminated=True, reward=1.0, info=INFO)


def test_an_info_of_any_kind_is_logged_as_far_as_json_goes(policy, tmp_path, caplog):
    log = tmp_path / "log.jsonl"
    batch = policy.rollout(None, PARAMS, env=Tells, num_episodes=2, seed=3, log_to=log, use_tqdm=False)
    assert batch["next", "reward"].flatten().tolist() == [1.0, 1.0] and batch["info"][0]["deep"] is DEEP
    for sample in read_jsonl(log):
        info = sample["info"]
        assert (info["nan"], info["bytes"], info["set"], info["type"]) == ("nan", "b'\\xff'", [1], "<class 'object'>")
        assert sample["reward"] == 1.0
    [message] = warnings_of(caplog)
    assert message.startswith(f"log_to={log}: info=")


def test_columns_that_json_lacks_are_logged_another_way(policy, tmp_path, caplog):
    log, values = tmp_path / "log.jsonl", [float("nan"), 1.0, {2}]
    batch = policy.rollout(PROMPTS, PARAMS, columns={"x": values}, seed=3, log_to=log, use_tqdm=False)
    assert list(batch["x"])[1:] == values[1:]
    assert {sample["group_id"]: sample["columns"]["x"] for sample in read_jsonl(log)} == {0: "nan", 1: 1.0, 2: [2]}
    assert len(warnings_of(caplog)) == 1
