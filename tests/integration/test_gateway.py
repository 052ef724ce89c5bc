"""The gateway: scripted agents over HTTP, and the rows of their sessions as a batch, token by token."""

import asyncio
import threading
import time
from collections import Counter

import httpx2
import numpy as np
import openai
import pytest

from rollout_engine import Agent, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import ConfigError, LifecycleError, RequestError
from rollout_engine.batches import advantages
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.sessions.errors import SessionNotFoundError
from rollout_engine.testing import tiny_checkpoint, tiny_model

from .scripted_agents import TEMPLATE, ScriptedAgent, whole_answer

HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = dict(max_model_len=1024, num_kv_blocks=1024, chat_template=TEMPLATE, log_stats=False, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(policy):
    with policy.gateway(SamplingParams(temperature=1.0), max_sessions=4_096) as made:
        yield made


@pytest.fixture(scope="module")
def trainer():
    return exact.enable(tiny_model())


def play(gateway, sessions, num_steps, first_seed):
    """Run an agent in each session, in process; returns the agents."""

    async def run():
        app = gateway._server.app
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), timeout=600) as client:
            agents = []
            for seed, session in enumerate(sessions, first_seed):
                headers = {"authorization": f"Bearer {session.api_key}"}

                async def post(body, url=f"{session.openai_base_url}/chat/completions", headers=headers):
                    response = await client.post(url, json=body, headers=headers)
                    assert response.status_code == 200, response.text
                    return whole_answer(response.text) if body["stream"] else response.json()

                agents.append(ScriptedAgent(post, seed))
            for start in range(0, len(agents), 16):
                await asyncio.gather(*(agent.play(num_steps) for agent in agents[start : start + 16]))
            return agents

    return asyncio.run(run())


def sampled_by(choice):
    """An answer as its client has it: ids of prompt and answer, and log-probs."""
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]), tuple(logprobs)


def sampled_in(rows):
    """The answers in rows, as `sampled_by`."""
    for row in rows:
        assert sum(row.mask) == sum(len(sample.token_ids) for _, sample in row.samples)
        for start, sample in row.samples:
            span = slice(start, start + len(sample.token_ids))
            assert all(row.mask[span]) and len(set(row.turns[span])) == 1
            prompt = row.prompt_token_ids + row.response[:start]
            yield tuple(prompt), tuple(row.response[span]), tuple(sample.logprobs.tolist())


MANY = [pytest.param(seed, 250, 10, marks=pytest.mark.slow) for seed in range(1_000, 2_000, 250)]


@pytest.mark.parametrize("first_seed, count, num_steps", [(0, 30, 4), *MANY])
def test_rows_of_agents_are_the_engines_own(gateway, trainer, first_seed, count, num_steps):
    sessions = [gateway.session(group_id=index % 4) for index in range(count)]
    agents = play(gateway, sessions, num_steps, first_seed)
    reasons = Counter()
    for agent, session in zip(agents, sessions, strict=True):
        rows = session.rows()
        reasons.update(row.began for row in rows)
        assert Counter(sampled_in(rows)) == Counter(map(sampled_by, agent.answered.values())), agent.steps
        for row in rows:
            assert row.parent_row < row.row
            assert row.parent_row >= 0 or row.began in ("start", "parallel")
    assert reasons["start"] >= count and {"rollback", "edited", "trimmed", "sample", "new_system"} <= set(reasons)
    for start in range(0, count, 50):
        some = sessions[start : start + 50]
        batch = gateway.batch(some, rewards=[float(index % 3) for index in range(len(some))])
        report = exact.check(batch, model=trainer)
        num_sampled = sum(sum(row.mask) for session in some for row in session.rows())
        assert report.is_exact and report.num_tokens == num_sampled and report.num_mixed == 0, report
        for session in some:
            session.close()


def test_sessions_of_a_group_are_its_samples(gateway):
    sessions = [gateway.session(group_id="task") for _ in range(3)]
    alone = gateway.session()
    for index, session in enumerate([*sessions, alone]):
        with openai.OpenAI(base_url=session.openai_base_url, api_key=session.api_key, max_retries=0) as client:
            for question in ["a", "b"][: 1 + index % 2]:
                messages = [{"role": "user", "content": question}]
                client.chat.completions.create(model="default", messages=messages, max_tokens=3, temperature=0.1)
    batch = gateway.batch([*sessions, alone], rewards=[1.0, 0.0, 0.5, 9.0])
    ids = [each.id for each in (sessions[0], sessions[1], sessions[1], sessions[2], alone, alone)]
    assert list(batch["session_id"]) == ids and batch["group_id"].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch["episode_id"].tolist() == [0, 1, 1, 2, 3, 3] and batch["sample_index"].tolist() == [0, 1, 1, 2, 0, 0]
    assert batch["parent_row"].tolist() == [-1, -1, 0, -1, -1, 0] and batch["row_index"].tolist() == [0, 0, 1, 0, 0, 1]
    assert list(batch["began"]) == ["start", "start", "edited", "start", "start", "edited"]
    found = advantages.grpo(batch["next", "reward"], batch["group_id"], scale=False).squeeze(-1).tolist()
    assert np.allclose(found, [0.5, -0.5, -0.5, 0.0, 0.0, 0.0]), "a session counts once, and its rows share"
    packed = gateway.batch(sessions, layout="packed")
    assert packed["cu_seqlens"].shape == (5,) and packed["next", "reward"].squeeze(-1).tolist() == [1.0, 0.0, 0.0, 0.5]
    with pytest.raises(RequestError, match="rewards"):
        gateway.batch([sessions[0], gateway.session()], rewards=[1.0])
    with pytest.raises(RequestError, match="answer"):
        gateway.batch([gateway.session()])


def test_an_update_during_a_session_shows_in_its_versions(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy, policy.gateway() as gateway:
        session, messages = gateway.session(), HELLO
        with openai.OpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
            for seed in range(2):
                answer = client.chat.completions.create(model="default", messages=messages, max_tokens=4, seed=seed)
                messages = [*messages, answer.choices[0].message.model_dump(), *HELLO]
                policy.update_weights(tiny_model(seed=seed + 1))
        batch = gateway.batch([session], rewards=[1.0])
        versions = batch["policy_version"][batch["masks", "all_assistant_mask"]].tolist()
        assert sorted(set(versions)) == [0, 1] and list(batch["began"]) == ["start"]
        assert exact.check(batch, model=exact.enable(tiny_model(seed=1))).num_tokens >= 1


def post(session, messages, **more):
    url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
    return httpx2.post(url, json={"messages": messages, "max_tokens": 4, **more}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def updated(checkpoint):
    """A policy whose weights tests replace, and its gateway."""
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy, policy.gateway() as gateway:
        yield policy, gateway


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.002)


def test_a_session_may_keep_one_policy_version(updated):
    policy, gateway = updated
    session, other, unused = gateway.session(pin_version=True), gateway.session(), gateway.session(pin_version=True)
    before = policy.policy_version
    messages = [*HELLO, post(session, HELLO).json()["choices"][0]["message"], *HELLO]
    post(other, HELLO)
    assert post(session, messages, policy_version=before + 7).status_code == 200, "the session decides"
    policy.update_weights(tiny_model(seed=before + 1))
    refused = post(session, messages, seed=1)
    assert refused.status_code == 403
    assert f"policy version {before}, and version {before + 1} is live" in refused.json()["error"]["message"]
    assert session.ended_by == "policy_version" and other.ended_by is None
    assert post(other, messages, seed=1).status_code == post(unused, HELLO).status_code == 200
    batch = gateway.batch([session, unused])
    sampled = batch["masks", "all_assistant_mask"]
    versions = [set(row[mask].tolist()) for row, mask in zip(batch["policy_version"], sampled, strict=True)]
    assert versions[-1] == {before + 1} and set.union(*versions[:-1]) == {before}


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
def test_an_update_ends_the_answer_of_a_session_that_keeps_its_version(updated, api):
    policy, gateway = updated
    session, before, found = gateway.session(pin_version=True), policy.policy_version, []
    body = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True}
    headers = {"x-api-key": session.api_key}
    url = f"{session.openai_base_url}/{api}"
    thread = threading.Thread(target=lambda: found.append(httpx2.post(url, json=body, headers=headers, timeout=60)))
    thread.start()
    wait_until(lambda: policy.get_metrics().core.num_running)
    policy.update_weights(tiny_model(seed=before + 1))
    thread.join()
    if api == "messages":  # it has no word for an answer that is cut short
        assert found[0].status_code == 503 and f"version {before + 1} is live" in found[0].text and not session.rows()
    else:
        [choice] = found[0].json()["choices"]
        [row] = session.rows()
        assert choice["finish_reason"] == "abort" and row.samples[0][1].finish_reason == "abort"
        assert {span.policy_version for span in row.samples[0][1].version_spans} == {before}
        assert post(session, HELLO, seed=2).status_code == 403
    assert session.ended_by == "policy_version"


def test_a_session_may_ask_for_a_version_that_is_to_come(updated):
    policy, gateway = updated
    version, found = policy.policy_version + 1, []
    session = gateway.session(sampling_params={"policy_version": version})
    thread = threading.Thread(target=lambda: found.append(post(session, HELLO)))
    thread.start()
    wait_until(lambda: policy.get_metrics().core.num_awaiting_version == 1)
    policy.update_weights(tiny_model(seed=version))
    thread.join()
    assert found[0].json()["choices"][0]["weight_version"] == version and post(session, HELLO, seed=1).is_success
    policy.update_weights(tiny_model(seed=version + 1))
    assert post(session, HELLO, seed=2).status_code == 403 and session.ended_by == "policy_version"
    with pytest.raises(RequestError, match="pin_version"):
        gateway.session(sampling_params={"policy_version": 99}, pin_version=True)


def test_episodes_of_agents_keep_one_version_if_asked(updated):
    policy, _ = updated
    before = policy.policy_version

    def play(session, task):
        first = post(session, HELLO)
        assert first.status_code == 200, first.text
        if task == "updates":
            policy.update_weights(tiny_model(seed=policy.policy_version + 1))
        post(session, [*HELLO, first.json()["choices"][0]["message"], *HELLO]).raise_for_status()
        return 1.0

    options = {"num_samples": 2, "max_in_flight": 1, "use_tqdm": False}
    batch = policy.rollout(["updates"], SamplingParams(max_tokens=4), env=Agent(play), pin_version=True, **options)
    assert list(batch["ended_by"]) == ["policy_version"] * 2 and not any(batch["error"])
    assert batch["next", "truncated"].all() and batch["next", "reward"].flatten().tolist() == [0.0, 0.0]
    sampled = batch["masks", "all_assistant_mask"]
    assert [set(row[mask].tolist()) for row, mask in zip(batch["policy_version"], sampled, strict=True)] == [
        {before},
        {before + 1},
    ]
    batch = policy.rollout(["stays"], SamplingParams(max_tokens=4), env=Agent(play), pin_version=True, **options)
    assert list(batch["ended_by"]) == ["terminated"] * 2 and batch["next", "reward"].flatten().tolist() == [1.0, 1.0]


def test_a_closed_gateway_says_so_and_its_rows_stay_readable(policy):
    with policy.gateway() as gateway:
        session, url = gateway.session(), gateway.url
        play(gateway, [session], 1, 70)
    gateway.close()
    with pytest.raises(LifecycleError, match=f"closed.*{url}.*policy.gateway"):
        gateway.session()
    assert gateway.url == url and session.rows() and len(gateway.batch([session])) == len(session.rows())


def test_keys_and_lives_of_sessions(policy):
    with policy.gateway() as gateway:
        session = gateway.session()
        with httpx2.Client(base_url=gateway.url, headers={"x-api-key": session.api_key}) as agent:
            for path in ("/v1/chat/completions", f"/sessions/{session.id}/reward", "/sessions"):
                assert agent.post(path, json={}).status_code == 401
            assert agent.get(f"/sessions/{session.id}/rows").status_code == 401
        with session:
            assert session.rows() == [] and session.total_reward is None
            session.reward(1.0)
            assert session.total_reward == 1.0
        session.close()
        with pytest.raises(SessionNotFoundError):
            gateway._sessions.registry.find(session.id)
    with pytest.raises(ConfigError):
        policy.gateway(no_such_option=1)
    with pytest.raises(RequestError):
        policy.gateway({"n": 2})


def test_kv_of_earlier_turns_is_found(policy):
    app = App(policy, ServeOptions(sessions=True))
    known = computed = 0

    async def run():
        nonlocal known, computed
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            session = (await client.post("/sessions", json={})).json()
            headers, messages, before = {"x-api-key": session["api_key"]}, [], 0
            for turn in range(8):
                messages.append({"role": "user", "content": f"{turn} " + "words " * 12})
                body = {"messages": messages, "max_tokens": 24, "seed": turn, "ignore_eos": True}
                url = f"{session['openai_base_url']}/chat/completions"
                answer = (await client.post(url, json=body, headers=headers)).json()
                messages.append(answer["choices"][0]["message"])
                usage = answer["usage"]
                known += before
                computed += max(0, before - usage["prompt_tokens_details"]["cached_tokens"])
                before = usage["total_tokens"]

    asyncio.run(run())
    assert known > 2_000 and computed <= 0.05 * known, (computed, known)


def test_a_session_without_answers_counts_in_its_group(gateway):
    sessions = [gateway.session(group_id=5) for _ in range(2)]
    play(gateway, sessions[:1], 1, 50)
    batch = gateway.batch(sessions, rewards=[1.0, 0.0])
    has_tokens = batch["masks", "all_assistant_mask"].any(-1)
    assert batch["session_id"] == [batch["session_id"][0]] * (len(batch) - 1) + [sessions[1].id]
    assert not has_tokens[-1] and has_tokens[:-1].all()
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"], episode_ids=batch["episode_id"])
    assert advantage[0] > 0 > advantage[-1]


def test_sessions_that_have_no_rows_to_give_are_refused(gateway):
    first, closed = gateway.session(), gateway.session()
    play(gateway, [first, closed], 1, 60)
    closed.close()
    with pytest.raises(RequestError, match="each given once"):
        gateway.batch([first, first])
    with pytest.raises(RequestError, match=f"{closed.id}.*batch them before"):
        gateway.batch([first, closed])


def test_a_session_counts_tokens_for_a_model_of_any_name(gateway):
    session = gateway.session()
    body = {"model": "claude-sonnet-4-5", "messages": HELLO}
    url = f"{session.anthropic_base_url}/v1/messages/count_tokens"
    found = httpx2.post(url, json=body, headers={"x-api-key": session.api_key})
    assert found.status_code == 200 and found.json()["input_tokens"] > 0, found.text
