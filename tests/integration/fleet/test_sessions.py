"""Sessions of agents over two replicas: whatever becomes of these, rows are what the agents were answered."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter

import httpx2
import pytest

from rollout_engine import AsyncLLM, RolloutPolicy, exact
from rollout_engine.base.errors import DirtyWeightsError
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from tests.faults.replica_deaths import all_serve
from tests.integration.scripted_agents import TEMPLATE, whole_answer

OPTIONS = dict(num_kv_blocks=512, max_model_len=1024, num_threads=1, chat_template=TEMPLATE, log_stats=False)
NUM_SESSIONS, NUM_TURNS, NUM_TOKENS = 6, 3, 60
HELLO = {"role": "user", "content": "hello"}


class Talks:
    """Agents that talk at once, each on a thread, in sessions whose draws are the same in every such talk."""

    def __init__(self, gateway, *, model="any"):
        self._model = model
        self.sessions = [
            gateway.session(sampling_params={"temperature": 1.0, "seed": index}) for index in range(NUM_SESSIONS)
        ]
        self.answered = [[] for _ in self.sessions]
        self._threads = [threading.Thread(target=self._talk, args=[index]) for index in range(NUM_SESSIONS)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, number):
        """Wait until this number of answers has arrived."""
        deadline = time.monotonic() + 60
        while sum(map(len, self.answered)) < number and time.monotonic() < deadline:
            time.sleep(0.002)

    def end(self):
        """Wait for the end of all; their rows as plain values."""
        for thread in self._threads:
            thread.join()
        for answered, session in zip(self.answered, self.sessions, strict=True):
            said = Counter(each for each in answered if each[1])  # an abort may come before the first token
            assert Counter(sampled_in(session.rows())) == said and len(answered) == NUM_TURNS
            assert session._session.num_open == 0
        return [[(row.began, *plain) for row in s.rows() for plain in sampled_in([row])] for s in self.sessions]

    def close(self):
        for session in self.sessions:
            session.close()

    def _talk(self, index):
        session, messages = self.sessions[index], [HELLO]
        url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
        with httpx2.Client(headers=headers, timeout=120) as http:
            for _ in range(NUM_TURNS):
                body = {"model": self._model, "messages": messages, "max_tokens": NUM_TOKENS, "stream": index % 2 == 1}
                body |= {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
                answer = http.post(url, json=body)
                assert answer.status_code == 200, answer.text
                [choice] = (whole_answer(answer.text) if body["stream"] else answer.json())["choices"]
                logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
                self.answered[index].append((tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs))
                messages = [*messages, choice["message"], HELLO]


def sampled_in(rows):
    """Of each answer the ids of its prompt, its own, and their log-probs."""
    for row in rows:
        for start, sample in row.samples:
            prompt = row.prompt_token_ids + row.response[:start]
            yield tuple(prompt), tuple(sample.token_ids), tuple(sample.logprobs.tolist())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The rows over one engine in this process, which nothing disturbs."""
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy, policy.gateway() as gateway:
        return Talks(gateway).end()


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, num_replicas=2, max_loras=2, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(policy):
    with policy.gateway() as made:
        yield made


@pytest.fixture
def talks(gateway):
    made = []
    yield lambda **options: made.append(Talks(gateway, **options)) or made[-1]
    for each in made:
        each.close()
    registry = gateway._server.app.served.sessions.registry
    assert len(registry) == 0 and registry.memory.num_bytes == 0


def keep(policy):
    for _ in range(3):
        policy.pause_generation(mode="keep")
        policy.resume_generation()


def nap(policy):
    policy.sleep(level=1, mode="keep")
    policy.wake_up()


def kill(policy):
    engine = AsyncLLM.from_engine(policy)
    os.kill(asyncio.run(engine.replicas())[1].pid, signal.SIGKILL)
    asyncio.run(all_serve(engine))


@pytest.mark.slow  # the verbs have their own tests over a fleet, and sessions theirs over one engine
@pytest.mark.parametrize("event", [keep, nap, kill])
def test_an_event_that_changes_no_weights_changes_no_row(policy, talks, expected, event):
    talk = talks()
    talk.wait_for(2)
    event(policy)
    assert talk.end() == expected


@pytest.mark.slow
def test_an_abort_leaves_what_there_is_and_the_agents_go_on_behind_it(policy, talks, gateway):
    talk = talks()
    talk.wait_for(1)
    policy.pause_generation(mode="abort")
    policy.resume_generation()
    talk.end()
    batch = gateway.batch(talk.sessions)
    assert exact.check(batch, model=exact.enable(tiny_model())).is_exact
    reasons = [sample.finish_reason for session in talk.sessions for row in session.rows() for _, sample in row.samples]
    assert "abort" in reasons and len(reasons) <= NUM_SESSIONS * NUM_TURNS


@pytest.mark.slow
def test_an_adapter_that_is_replaced_and_removed_stands_in_the_rows(policy, talks):
    policy.add_lora(random_adapter(tiny_model(), "a", seed=1))
    talk = talks(model="a")
    talk.wait_for(2)
    policy.add_lora(random_adapter(tiny_model(), "a", seed=2, revision=1))
    talk.end()
    rows = [row for session in talk.sessions for row in session.rows()]
    assert {name for row in rows for name in row.adapters} == {"a"}
    policy.remove_lora("a")
    later = talks(model="a")  # no adapter's name any more: the policy itself answers
    later.end()
    assert {name for session in later.sessions for row in session.rows() for name in row.adapters} == {None}


@pytest.mark.slow
def test_an_update_in_flight_shows_in_the_versions_of_the_rows(policy, talks, gateway):
    before = policy.policy_version
    talk = talks()
    talk.wait_for(2)
    policy.update_weights(tiny_model(seed=5))
    talk.end()
    batch = gateway.batch(talk.sessions)
    versions = batch["policy_version"][batch["masks", "all_assistant_mask"]]
    assert set(versions.tolist()) == {before, before + 1}
    report = exact.check(batch, model=exact.enable(tiny_model(seed=5)))
    assert report.num_tokens > 0
    last = talks()
    last.end()
    again = gateway.batch(last.sessions)
    assert exact.check(again, model=exact.enable(tiny_model(seed=5))).is_exact


def test_weights_that_are_incomplete_refuse_requests_until_a_complete_update(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy, policy.gateway() as gateway:
        session, found = gateway.session(), []
        url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}

        def ask(**more):
            return httpx2.post(url, json={"messages": [HELLO], "max_tokens": 4, **more}, headers=headers, timeout=60)

        thread = threading.Thread(target=lambda: found.append(ask(max_tokens=900, ignore_eos=True)))
        thread.start()
        while not policy.get_metrics().core.num_running:
            time.sleep(0.002)
        bad = {name: tensor * float("nan") for name, tensor in tiny_model(seed=2).state_dict().items()}
        with pytest.raises(DirtyWeightsError):
            policy.update_weights(bad, staging="inplace")
        refused = ask(seed=1)
        assert refused.status_code == 409 and "complete update" in refused.json()["error"]["message"]
        policy.update_weights(tiny_model(seed=3))
        thread.join()
        assert found[0].status_code == 200 and ask(seed=2).status_code == 200
        held = session._session
        assert held.num_open == 0 and held.num_turns == 2 and len(session.rows()) == 2
