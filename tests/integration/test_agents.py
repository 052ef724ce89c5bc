"""Agents over a real engine and a real server: exact rows, each token once, the same again at a fixed seed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import Agent, AsyncLLM, EvalTask, RolloutPolicy, SamplingParams, advantages, exact, read_jsonl
from rollout_engine.base.errors import EpisodeError, RequestError
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.models import CHAT_TEMPLATE

EXAMPLES = Path(__file__).parents[2] / "examples"

OPTIONS = {"dtype": "float32", "num_kv_blocks": 512, "max_model_len": 512, "num_threads": 1}
PARAMS = SamplingParams(max_tokens=8)
TASKS = [{"words": ["Hello", "Again"]}, {"words": ["One", "Two", "Three"]}]
PROGRAM = """
import json, os, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, "temperature": 1.7, "max_tokens": 400}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = []
for word in json.loads(os.environ["ROLLOUT_TASK"])["words"]:
    messages.append({"role": "user", "content": word})
    messages.append(ask(messages))
print(json.dumps({"reward": len(messages[-1]["content"])}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made
        assert made.get_num_unfinished_requests() == 0


@pytest.fixture
def program(tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    return str(tmp_path / "agent.py")


def ask(session, messages):
    return post(session, {"messages": messages, "max_tokens": 8})


def post(session, body):
    request = urllib.request.Request(
        f"{session.openai_base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as problem:
        problem.close()
        raise


def converse(session, task):
    """The program above, as a function."""
    messages = []
    for word in task["words"]:
        messages.append({"role": "user", "content": word})
        messages.append(ask(session, messages))
    return len(messages[-1]["content"])


def play(policy, env, tasks=TASKS, **options):
    return policy.rollout(tasks, PARAMS, env=env, use_tqdm=False, **{"num_samples": 2, "seed": 3, **options})


def assert_same(first, second):
    for key in (("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"), ("next", "reward")):
        assert torch.equal(first[key], second[key]), key


def test_a_programs_rows_are_exact_and_grow_at_the_end(policy, program, checkpoint):
    batch = play(policy, f"agent:{program}")
    assert batch["group_id"].tolist() == [0, 0, 1, 1] and batch["episode_id"].tolist() == [0, 1, 2, 3]
    assert batch["num_turns"].tolist() == [2, 2, 3, 3] and list(batch["began"]) == ["start"] * 4
    assert list(batch["error"]) == [None] * 4 and list(batch["ended_by"]) == ["terminated"] * 4
    sampled = batch["masks", "all_assistant_mask"]
    assert (batch["masks", "turn"] >= 0).equal(sampled)
    for row in range(4):
        turns = batch["masks", "turn"][row][sampled[row]].unique_consecutive().tolist()
        assert turns == list(range(batch["num_turns"][row])), "each turn once, in order"
        assert all((batch["masks", "turn"][row] == turn).sum() <= 8 for turn in turns), "the rollout's max_tokens"
        assert batch["rewards", "turn"][row].sum() == batch["next", "reward"][row]
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    assert exact.check(batch, exact.token_logprobs(trainer, batch)).is_exact
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
    assert advantage.shape == (4, 1) and abs(advantage.sum()) < 1e-3


def test_a_seed_plays_the_same_again_whether_programs_or_functions(policy, program):
    first = play(policy, Agent(program), max_in_flight=1)
    assert_same(first, play(policy, Agent(program)))
    assert_same(first, play(policy, Agent(converse)))
    other = play(policy, Agent(converse), seed=4)
    assert other["tokens", "full"].shape != first["tokens", "full"].shape or not torch.equal(
        other["tokens", "full"], first["tokens", "full"]
    )


def test_one_agent_over_three_apis_samples_the_same(tmp_path):
    template = "{% for tool in tools or [] %}<tool_call>{{ tool['function']['name'] }}{% endfor %}" + CHAT_TEMPLATE
    path = tiny_checkpoint(tmp_path)
    (path / "chat_template.jinja").write_text(template)
    with RolloutPolicy.from_pretrained(path, **OPTIONS) as made:
        batches = [
            play(
                made,
                Agent(str(EXAMPLES / f"agent_{name}.py"), reward=lambda output: len(output)),
                [{"sum": "1+2"}],
                num_samples=3,
            )
            for name in ("chat", "responses", "messages")
        ]
    assert list(batches[0]["error"]) == [None] * 3
    for batch in batches[1:]:
        assert_same(batch, batches[0])


def test_an_agent_that_edits_its_past_has_branches_that_count_once(policy):
    def edits(session, task):
        messages = [{"role": "user", "content": "Hello"}]
        messages.append(ask(session, messages))
        messages[-1] = {"role": "assistant", "content": "something else"}
        ask(session, [*messages, {"role": "user", "content": "Go on"}])
        return float(session.id < task)

    batch = play(policy, Agent(edits), ["a", "b"])
    assert batch["episode_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(batch["began"]) == ["start", "edited"] * 4 and batch["row_index"].tolist() == [0, 1] * 4
    assert batch["parent_row"].tolist() == [-1, 0] * 4 and batch["num_turns"].tolist() == [2] * 8
    assert len(set(batch["session_id"])) == 4
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"]).flatten()
    assert torch.equal(advantage[::2], advantage[1::2])
    alone = advantages.grpo(batch["next", "reward"][::2], batch["group_id"][::2], episode_ids=torch.arange(4))
    assert torch.equal(advantage[::2], alone.flatten())


def test_an_episode_that_fails_keeps_its_tokens_and_does_not_count(policy, tmp_path):
    def fails(session, task):
        ask(session, [{"role": "user", "content": "Hello"}])
        if task == "bad":
            raise ValueError("no such row")
        return 1.0

    batch = play(policy, Agent(fails), ["bad", "good"], log_to=tmp_path / "log.jsonl")
    assert [error is None for error in batch["error"]] == [False, False, True, True]
    assert batch["error"][0].endswith("fails raised ValueError: no such row")
    assert list(batch["finish_reason"][:2]) == ["error"] * 2
    assert batch["masks", "all_assistant_mask"].any(1).all()
    assert advantages.grpo(batch["next", "reward"], batch["group_id"]).abs().max() == 0
    samples = sorted(read_jsonl(tmp_path / "log.jsonl"), key=lambda sample: sample["group_id"])
    assert [sample["error"] is None for sample in samples] == [False, False, True, True]
    assert samples[2]["columns"]["session_id"] and samples[2]["info"]["task"] == "good"


def test_episodes_without_an_answer_are_empty_rows(policy):
    batch = play(policy, Agent(lambda session, task: 1.0))
    assert batch["tokens", "full"].shape[0] == 4 and not batch["masks", "all_assistant_mask"].any()
    assert batch["next", "reward"].flatten().tolist() == [1.0] * 4


def test_params_of_token_ids_are_forced_too(policy):
    params = SamplingParams(max_tokens=8, logit_bias={70: 100.0})
    batch = policy.rollout(TASKS, params, env=Agent(converse), seed=1, use_tqdm=False)
    assert set(batch["tokens", "full"][batch["masks", "all_assistant_mask"]].tolist()) == {70}


@pytest.mark.quick(1)
@pytest.mark.parametrize("own", [{"logit_bias": {"70": 100}}, {"allowed_token_ids": [70]}, {"presence_penalty": 2}])
def test_an_agents_own_changes_of_the_distribution_are_replaced(policy, own):
    def biased(session, task):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **task}
        return float(len(post(session, body)["content"]))

    found, plain = (policy.rollout([each], PARAMS, env=Agent(biased), seed=1, use_tqdm=False) for each in (own, {}))
    assert_same(found, plain)


@pytest.mark.parametrize("versions", [{"policy_version": 7}, {"min_policy_version": 7}])
def test_agents_ask_for_versions_too(policy, versions):
    params = PARAMS.clone(version_wait="refuse")
    with pytest.raises(EpisodeError, match="503|policy_version"):
        policy.rollout(TASKS, params, env=Agent(converse), use_tqdm=False, **versions)


def test_all_that_fail_raise_the_first_fault(policy):
    with pytest.raises(EpisodeError, match="All 4 episodes failed; the first: sh -c 'exit 3': it exited with status 3"):
        play(policy, Agent(["sh", "-c", "exit 3"]))


def test_a_session_refuses_turns_beyond_its_limits(policy):
    def greedy(session, task):
        messages, answers = [{"role": "user", "content": "Hello"}], 0
        try:
            while True:
                messages += [ask(session, messages), {"role": "user", "content": "More"}]
                answers += 1
        except urllib.error.HTTPError as refusal:
            assert 400 <= refusal.code < 500
            return answers

    batch = play(policy, Agent(greedy), [None], max_turns=3)
    assert batch["next", "reward"].flatten().tolist() == [3.0, 3.0] and batch["num_turns"].tolist() == [3, 3]
    assert play(policy, Agent(greedy), [None], max_episode_tokens=60)["masks", "all_attention_mask"].sum(1).max() <= 60


@pytest.mark.parametrize(
    "options, said",
    [
        ({"reward_fn": len}, "Agent(reward=...) gives the rewards"),
        ({"columns": {"a": [1, 2]}}, "Put them into the tasks"),
        ({"tools": [len]}, "The agent decides on this"),
        ({"seats": {0: len}}, "Agents have these options of episodes"),
        ({"num_episodes": 3}, "2, the number of tasks"),
        ({"tasks": [object()]}, "data that JSON can hold"),
        ({"tasks": []}, "at least one task"),
        ({"tasks": 7}, "a list of rows"),
        ({"env": "agent:"}, "a command, such as"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(policy, options, said):
    with pytest.raises(RequestError) as refusal:
        play(policy, **{"env": Agent(converse), **options})
    assert said in str(refusal.value)


def test_groups_arrive_one_by_one_from_a_loop(policy):
    async def collect():
        options = {"env": Agent(converse), "num_samples": 2, "seed": 3}
        return [group async for group in policy.arollout(TASKS, PARAMS, **options)]

    groups = sorted(asyncio.run(collect()), key=lambda group: group["group_id"][0].item())
    whole = play(policy, Agent(converse))
    assert [group["group_id"].tolist() for group in groups] == [[0, 0], [1, 1]]
    assert groups[1]["tokens", "full"].equal(whole["tokens", "full"][2:, : groups[1]["tokens", "full"].shape[1]])


def test_tokens_carry_the_version_that_sampled_them_if_weights_change_in_a_session(policy, checkpoint):
    model, before = AutoModelForCausalLM.from_pretrained(checkpoint), policy.policy_version

    def waits(session, task):
        messages = [{"role": "user", "content": "Hello"}]
        messages.append(ask(session, messages))
        policy.update_weights(model)
        return len(ask(session, [*messages, {"role": "user", "content": "Again"}])["content"])

    batch = play(policy, Agent(waits), [None], num_samples=1)
    versions, turns = batch["policy_version"], batch["masks", "turn"]
    assert set(versions[turns == 0].tolist()) == {before} and set(versions[turns == 1].tolist()) == {before + 1}


@pytest.mark.slow
def test_an_engine_in_another_process_answers_agents_alike(policy, checkpoint, program):
    with RolloutPolicy(AsyncLLM(checkpoint, **OPTIONS)) as other:
        assert_same(play(other, Agent(program)), play(policy, Agent(program)))


def test_an_evaluation_asks_an_agent_all_rows_and_resumes(policy, tmp_path):
    task = EvalTask(name="words", env=Agent(converse), rows=TASKS, correct_from=3.0)
    report = policy.evaluate(task, num_samples=2, out=tmp_path / "out", seed=3, use_tqdm=False)
    again = policy.evaluate(task, num_samples=3, out=tmp_path / "out2", seed=3, use_tqdm=False)
    assert len(list(report.samples)) == 4 and len(list(again.samples)) == 6
    tokens = [[sample["response_token_ids"] for sample in each.samples][:2] for each in (report, again)]
    assert tokens[0] == tokens[1], "sample i of a prompt is the same, however many there are"


OWNER = """
import sys
from rollout_engine import Agent, RolloutPolicy, SamplingParams

policy = RolloutPolicy.from_pretrained(sys.argv[1], num_kv_blocks=64, num_threads=1)
script = f"echo $$ >> {sys.argv[2]}; setsid sleep 1000 & echo $! >> {sys.argv[2]}; sleep 1000"
policy.rollout([1, 2], SamplingParams(), env=Agent(["sh", "-c", script]), use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_programs_end_with_the_trainer_however_it_ends(number, checkpoint, tmp_path):
    listed = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(checkpoint), str(listed)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as owner:
        while len(listed.read_text().split() if listed.exists() else []) < 4:
            assert owner.poll() is None
        owner.send_signal(number)
    left = [psutil.Process(pid) for pid in map(int, listed.read_text().split()) if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=60)[1]
    deadline = time.monotonic() + 60
    while (directories := list(tmp_path.glob("rollout-agents-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not directories
