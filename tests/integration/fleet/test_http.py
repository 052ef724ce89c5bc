"""Two replicas behind one HTTP server: clients see one engine, whatever becomes of a replica."""

import asyncio
import os
import signal

import httpx2
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

import sync
from rollout_engine import LLM, RolloutPolicy, SamplingParams
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers
from tests.faults.replica_deaths import all_serve

pytestmark = pytest.mark.slow

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)
NUM_REQUESTS, NUM_TOKENS = 16, 300
PROMPTS = [[5 + i, 6, 7] for i in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Other weights, as version 1."""
    path = tmp_path_factory.mktemp("weights") / "store"
    sync.publish(path, tiny_model(seed=5).state_dict(), 1)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint, store):
    """Version -> tokens and log-probs of each request, by one engine alone."""
    params = [
        SamplingParams(seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, output_kind="final_only")
        for i in range(NUM_REQUESTS)
    ]
    found = {}
    with LLM(checkpoint, **OPTIONS) as llm:
        for version in (0, 1):
            if version:
                llm.update_weights(store, version=version)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found[version] = [(each.outputs[0].token_ids, each.outputs[0].logprobs.tolist()) for each in outputs]
    return found


@pytest.fixture
def policy(checkpoint):
    uvloop.new_event_loop().close()  # the first of a process leaves a pipe
    leftovers = Leftovers()
    with RolloutPolicy.from_pretrained(checkpoint, num_replicas=2, **OPTIONS) as made:
        yield made
    leftovers.assert_none()


@pytest.fixture
def server(policy):
    with HttpServer(policy, ServeOptions(port=0)) as made:
        yield made


@pytest.fixture
def url(server):
    return server.url


def body(index, **more):
    fields = {"prompt": PROMPTS[index], "seed": index, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return fields | {"logprobs": 0, "return_token_ids": True, "session_id": f"session-{index}"} | more


def said(choice):
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class Clients:
    """Sends every request at once, and asks all the while whether the server is healthy."""

    def __init__(self, url):
        self.http, self.healths = httpx2.AsyncClient(base_url=url, timeout=120), []

    async def __aenter__(self):
        self._watch = asyncio.create_task(self._watch_health())
        return self

    async def __aexit__(self, *_):
        self._watch.cancel()
        await asyncio.wait([self._watch])
        await self.http.aclose()
        assert self.healths and set(self.healths) == {200}

    def start(self):
        return asyncio.gather(*(self.post("/v1/completions", body(i)) for i in range(NUM_REQUESTS)))

    async def post(self, path, fields=None):
        response = await self.http.post(path, json=fields or {})
        assert response.status_code == 200, response.text
        return response.json()

    async def until_running(self):
        """Wait until every request has come."""
        while (await self.http.get("/load")).json()["server_load"] < NUM_REQUESTS:
            await asyncio.sleep(0.005)

    async def _watch_health(self):
        while True:
            self.healths.append((await self.http.get("/health")).status_code)
            await asyncio.sleep(0.01)


def test_requests_have_the_tokens_of_one_engine(url, expected):
    async def run():
        async with Clients(url) as clients:
            return await clients.start()

    assert [said(each["choices"][0]) for each in asyncio.run(run())] == expected[0]


def test_an_update_reaches_every_replica(policy, url, store, expected):
    async def run():
        async with Clients(url) as clients:
            during = clients.start()
            await clients.until_running()
            report = await clients.post("/update_weights", {"weight_dir": str(store)})
            assert report["weight_version"] == 1
            for answer in await during:
                [choice] = answer["choices"]
                assert len(choice["token_ids"]) == NUM_TOKENS and choice["finish_reason"] == "length"
            return await clients.start()

    answers = asyncio.run(run())
    assert [said(each["choices"][0]) for each in answers] == expected[1]
    assert {each["weight_version"] for each in answers} == {1}
    assert len(set(policy.collective_rpc("get_weight_digest"))) == 1


def test_a_pause_that_keeps_requests_changes_no_token(url, expected):
    async def run():
        async with Clients(url) as clients:
            during = clients.start()
            await clients.until_running()
            for _ in range(3):
                await clients.post("/pause?mode=keep")
                assert (await clients.http.get("/is_paused")).json() == {"is_paused": True}
                await clients.post("/resume")
            return await during

    assert [said(each["choices"][0]) for each in asyncio.run(run())] == expected[0]


def test_a_pause_that_aborts_gives_what_there_is_and_lets_new_requests_wait(url, expected):
    async def run():
        async with Clients(url) as clients:
            during = clients.start()
            await clients.until_running()
            await clients.post("/pause?mode=abort")
            waiting = clients.start()
            aborted = await during
            assert not waiting.done()
            await clients.post("/resume")
            return aborted, await waiting

    aborted, answers = asyncio.run(run())
    for each, (tokens, logprobs) in zip(aborted, expected[0], strict=True):
        [choice] = each["choices"]
        given = choice["token_ids"]
        assert choice["finish_reason"] in ("abort", "length")
        assert said(choice) == (tokens[: len(given)], logprobs[: len(given)])
    assert [said(each["choices"][0]) for each in answers] == expected[0]


def test_a_replica_that_is_killed_under_load_loses_nothing(server, expected):
    engine = server.app.served.engine

    async def run():
        async with Clients(server.url) as clients:
            during = clients.start()
            await clients.until_running()
            os.kill((await engine.replicas())[1].pid, signal.SIGKILL)
            answers = await during
            found = await all_serve(engine)
            assert "status -9" in found[1].problem
            return answers, await clients.start()

    for answers in asyncio.run(run()):
        assert [said(each["choices"][0]) for each in answers] == expected[0]


def test_metrics_tell_replicas_apart_and_come_while_one_is_killed(server, expected):
    engine = server.app.served.engine

    async def scrape(clients):
        response = await clients.http.get("/metrics")
        assert response.status_code == 200, response.text
        families = text_string_to_metric_families(response.text)
        return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}

    def of_replica(seen, name, **labels):
        found = (dict(key[1:]) | {"value": value} for key, value in seen.items() if key[0] == f"rollout_engine_{name}")
        return {each["replica"]: each["value"] for each in found if each.items() >= labels.items()}

    def sampled(seen):
        return seen["vllm:generation_tokens_total", ("engine", "0"), ("model_name", server.app.served.model)]

    async def run():
        async with Clients(server.url) as clients:
            await clients.start()
            first = await scrape(clients)
            during = clients.start()
            await clients.until_running()
            os.kill((await engine.replicas())[1].pid, signal.SIGKILL)
            while of_replica(seen := await scrape(clients), "replica_state", state="SYNCED")["1"]:
                pass
            await during
            await all_serve(engine)
            return first, seen, await scrape(clients)

    first, lost, last = asyncio.run(run())
    each = of_replica(first, "replica_tokens_sampled_total")
    assert each.keys() == {"0", "1"} and min(each.values()) > 0
    assert sum(each.values()) == sampled(first) == NUM_REQUESTS * NUM_TOKENS
    assert of_replica(first, "replica_answered") == of_replica(last, "replica_answered") == {"0": 1, "1": 1}
    assert of_replica(lost, "replica_answered") == {"0": 1, "1": 0}
    assert of_replica(lost, "replica_policy_version") == {"0": 0, "1": -1}
    assert of_replica(last, "replica_requests_unfinished") == {"0": 0, "1": 0}
    assert sampled(first) <= sampled(lost) <= sampled(last)
