"""`RolloutService` and `LoadBalancer` over fake models."""

import asyncio
import threading
import time
from functools import partial

import pytest

from rollout_engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    GenerateTimeoutError,
    LifecycleError,
    LLMEngine,
    PoolingParams,
    RequestError,
    RetryableError,
    RolloutPolicy,
    RolloutService,
)
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.fake_executor import fake_pooled
from tests.unit.fake_engine import make_engine
from tests.unit.fleet.fake_fleet import make_service

SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
ENDLESS = SamplingParams(max_tokens=3900, ignore_eos=True, seed=2)
PROMPTS = [[5 + i, 6, 7, 8] for i in range(8)]


@pytest.fixture
def made():
    service, provider = make_service()
    with service:
        yield service, provider
        service.frontend.client.check_integrity()


def tokens(outputs):
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def num_tokens_of(provider):
    """Tokens that each replica has sampled."""
    return [provider.replicas[i].client.driver.core.stats.num_tokens_sampled for i in sorted(provider.replicas)]


def slow_down(provider, seconds=0.005):
    for replica in provider.replicas.values():
        replica.executor.before_step = lambda: time.sleep(seconds)


def eventually(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


@pytest.mark.parametrize(
    "prompts", ["a", ["a", "b"], [5, 6], [[5, 6], [7]], {"prompt": "a"}, [{"role": "user", "content": "a"}], []]
)
def test_generate_gives_what_a_single_engine_gives(service, prompts):
    expected = make_engine(max_model_len=4000)
    expected.add_requests(prompts, SHORT)
    finished = {}
    while expected.has_unfinished_requests():
        finished |= {output.request_id: output for output in expected.step() if output.finished}
    in_order = sorted(finished.values(), key=lambda output: int(output.request_id.removeprefix("request-")))
    assert tokens(service.generate(prompts, SHORT, use_tqdm=False)) == tokens(in_order)
    assert tokens(asyncio.run(service.agenerate(prompts, SHORT))) == tokens(in_order)


def test_prompt_token_ids_are_prompts(service):
    one = service.generate(prompt_token_ids=[5, 6], sampling_params=SHORT, use_tqdm=False)
    many = service.generate(prompt_token_ids=[[5, 6], [7]], sampling_params=SHORT, use_tqdm=False)
    assert tokens(one) == tokens(many)[:1] and len(many) == 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(), "prompts=None"),
        (dict(prompts="a", prompt_token_ids=[5]), "both given"),
        (dict(prompt_token_ids=["a"]), "prompt_token_ids='a'"),
        (dict(prompt_token_ids=[{"prompt": "a"}]), "prompt_token_ids={'prompt': 'a'}"),
        (dict(prompts=["a", "b"], sampling_params=[SHORT]), "or 2: one per prompt"),
        (dict(prompts=["a", "b"], session_id=["s"]), "or 2: one per prompt"),
        (dict(prompts="a", session_id=5), "session_id=5"),
        (dict(prompts="a", session_id=""), "session_id=''"),
        (dict(prompts="a", session_id="s" * 2000), "1024 bytes"),
        (dict(prompts="a", session_id="s", replica_index=0), "both choose the replica"),
        (dict(prompts="a", replica_index=2), "^replica_index=2 .* one of 0, 1"),
        (dict(prompts="a", replica_index=-1), "replica_index=-1"),
        (dict(prompts="a", replica_index=True), "replica_index=True"),
        (dict(prompts="a", replica_index="0"), "replica_index='0'"),
        (dict(prompts="a", timeout_seconds=0), "timeout_seconds=0"),
        (dict(prompts="a", timeout_seconds=-1.0), "timeout_seconds=-1.0"),
        (dict(prompts="a", timeout_seconds=float("nan")), "timeout_seconds=nan"),
        (dict(prompts="a", timeout_seconds=float("inf")), "timeout_seconds=inf"),
        (dict(prompts="a", timeout_seconds="5"), "timeout_seconds='5'"),
        (dict(prompts="a", actor_index=0), "give replica_index"),
        (dict(prompts="a", max_tokens=5), "give sampling_params=SamplingParams"),
    ],
)
def test_bad_calls_are_refused_and_nothing_is_queued(service, provider, arguments, said):
    arguments = {"sampling_params": SHORT, **arguments}
    with pytest.raises(RequestError, match=said):
        service.generate(**arguments)
    with pytest.raises(RequestError, match=said):
        asyncio.run(service.agenerate(**arguments))
    assert len(service.frontend.streams) == 0
    assert service.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("index", [0, 1])
def test_replica_index_chooses_the_replica(service, provider, index):
    service.generate(PROMPTS, SHORT, use_tqdm=False, replica_index=index)
    assert num_tokens_of(provider)[index] == 4 * len(PROMPTS)
    assert num_tokens_of(provider)[1 - index] == 0


def test_a_pinned_request_goes_on_elsewhere_when_its_replica_dies(service, provider):
    long = ENDLESS.clone(max_tokens=100)
    expected = tokens(service.generate(PROMPTS, long, use_tqdm=False, replica_index=0))
    slow_down(provider)
    provider.starts = False

    def kill():
        eventually(lambda: num_tokens_of(provider)[1] > 200)
        provider.replicas[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    found = service.generate(PROMPTS, long, use_tqdm=False, replica_index=1)
    killer.join()
    assert tokens(found) == expected
    assert service.health()[1].state == "STARTING"
    with pytest.raises(RetryableError, match="replica_index=1: that replica is STARTING"):
        service.generate("a", SHORT, replica_index=1)
    with pytest.raises(RetryableError, match="replica_index=1: .* cannot answer"):
        service.get_cache_usage(1)


def test_a_session_stays_with_one_replica_until_that_one_dies(service, provider):
    prompts = iter(range(100))

    def home():
        before = num_tokens_of(provider)
        for _ in range(5):
            service.generate([next(prompts), 9, 9], SHORT, use_tqdm=False, session_id="s")
        after = num_tokens_of(provider)
        grown = [index for index in (0, 1) if after[index] > before[index]]
        assert len(grown) == 1
        return grown[0]

    first = home()
    assert home() == first
    provider.starts = False
    provider.replicas[first].kill()
    eventually(lambda: service.health()[first].state == "STARTING")
    assert home() == 1 - first
    assert service.get_balancer_stats().decisions["session"] >= 9


def test_each_prompt_may_have_a_session_of_its_own(service, provider):
    for _ in range(3):
        service.generate(PROMPTS, SHORT, use_tqdm=False, session_id=[f"s{i}" for i in range(8)])
    assert service.get_balancer_stats().decisions["session"] == 16
    assert min(num_tokens_of(provider)) > 0


def test_session_ids_come_from_every_face_and_have_no_effect_without_replicas(service, monkeypatch):
    routes = []

    def record(client):
        send = client.add_request
        monkeypatch.setattr(client, "add_request", lambda *args: (routes.append(args[1].session_id), send(*args)))

    async def read(engine, **options):
        return [output async for output in engine.generate([5], SHORT, **options)]

    async def roll(policy, **options):
        return [batch async for batch in policy.arollout([5], SHORT, **options)]

    for frontend in (service.frontend, make_engine().frontend):
        record(frontend.client)
        engine = LLMEngine(frontend)
        engine.add_request("r", [5], SHORT, session_id="a")
        engine.add_requests([[5], [6]], SHORT, session_id=["b", None])
        while engine.has_unfinished_requests():
            engine.step()
        llm = LLM.from_engine(engine)
        llm.generate([[5], [6]], SHORT, use_tqdm=False, session_id="c")
        llm.chat([{"role": "user", "content": "a"}], SHORT, use_tqdm=False, session_id="d")
        assert routes == ["a", "b", None, "c", "c", "d"]
        policy = RolloutPolicy(engine)
        policy.rollout([[5], [6]], SHORT, session_id=["e", "f"], use_tqdm=False)
        asyncio.run(roll(policy, session_id="g"))
        assert routes[6:] == ["e", "f", "g"]
        routes.clear()
        calls = (llm.generate, policy.rollout, partial(engine.add_request, "r"))
        for call in (partial(each, [5], SHORT) for each in calls):
            with pytest.raises(RequestError, match="session_id=7 is not allowed: must be a str"):
                call(session_id=7)
        assert routes == [] and len(frontend.streams) == 0
    streaming = AsyncLLM._standing_on(service.frontend)
    assert asyncio.run(read(streaming, session_id="h"))[-1].finished and routes == ["h"]
    with pytest.raises(RequestError, match="session_id=7"):
        asyncio.run(read(streaming, session_id=7))


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_late_is_aborted_and_the_error_says_how_far_it_came(service, provider, is_async):
    slow_down(provider)
    params = [SHORT, ENDLESS, SHORT, ENDLESS.clone(n=2)]
    with pytest.raises(GenerateTimeoutError, match="2 of 4 requests had not ended after 0.4 s and were abo") as caught:
        if is_async:
            asyncio.run(service.agenerate(PROMPTS[:4], params, timeout_seconds=0.4))
        else:
            service.generate(PROMPTS[:4], params, use_tqdm=False, timeout_seconds=0.4)
    error = caught.value
    assert [output is not None for output in error.outputs] == [True, False, True, False]
    assert set(error.num_tokens) == {1, 3} and all(count > 0 for count in error.num_tokens.values())
    assert all(f"prompts[{index}] after {count} tokens" in str(error) for index, count in error.num_tokens.items())
    eventually(lambda: service.get_num_unfinished_requests() == 0)
    assert len(service.frontend.streams) == 0
    assert service.generate("a", SHORT, use_tqdm=False, timeout_seconds=60)[0].finished


def test_a_hung_replica_does_not_delay_a_deadline(service, provider):
    release = threading.Event()
    provider.replicas[0].executor.before_step = release.wait
    try:
        with pytest.raises(GenerateTimeoutError, match=r"prompts\[0\] after 0 tokens"):
            service.generate("a", SHORT, use_tqdm=False, replica_index=0, timeout_seconds=0.2)
        assert not release.is_set()
    finally:
        release.set()


def test_cancelling_agenerate_aborts_its_requests(service, provider):
    slow_down(provider)

    async def run():
        task = asyncio.create_task(service.agenerate(PROMPTS, ENDLESS))
        while service.get_num_unfinished_requests() < len(PROMPTS):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    eventually(lambda: service.get_num_unfinished_requests() == 0)
    assert len(service.frontend.streams) == 0


def test_several_threads_generate_at_once(service, provider):
    slow_down(provider)
    long = threading.Thread(target=lambda: service.generate("a", ENDLESS.clone(max_tokens=100), use_tqdm=False))
    long.start()
    eventually(lambda: service.get_num_unfinished_requests() == 1)
    service.generate("b", SHORT, use_tqdm=False)
    assert service.get_num_unfinished_requests() == 1
    long.join()


def test_generate_refuses_while_paused_and_agenerate_waits(service):
    service.pause_generation()
    with pytest.raises(LifecycleError, match="generate"):
        service.generate("a", SHORT)

    async def run():
        task = asyncio.create_task(service.agenerate("a", SHORT))
        while not service.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        service.resume_generation()
        return await task

    assert asyncio.run(run())[0].finished


def test_counts_are_of_one_replica_or_of_all(service, provider):
    slow_down(provider)
    runs = [
        threading.Thread(target=service.generate, args=(PROMPTS[:count], ENDLESS.clone(max_tokens=200)), kwargs=options)
        for count, options in ((2, dict(replica_index=0, use_tqdm=False)), (3, dict(replica_index=1, use_tqdm=False)))
    ]
    for run in runs:
        run.start()
    eventually(lambda: [service.get_num_unfinished_requests(i) for i in (0, 1, None)] == [2, 3, 5])
    eventually(lambda: all(service.get_cache_usage(i) > 0 for i in (0, 1, None)))
    usages = [service.get_cache_usage(index) for index in (0, 1)]
    assert min(usages) <= service.get_cache_usage() <= 1.0
    for run in runs:
        run.join()
    for call in (service.get_num_unfinished_requests, service.get_cache_usage):
        with pytest.raises(RequestError, match="replica_index=5 .* one of 0, 1"):
            call(5)


def test_replicas_come_and_go(service, provider):
    service.scale(3)
    eventually(lambda: [each.state for each in service.health()] == ["SYNCED"] * 3)
    assert service.generate("a", SHORT, use_tqdm=False, replica_index=2)
    service.scale(1)
    eventually(lambda: [each.state for each in service.health()] == ["SYNCED", "DEAD", "DEAD"])
    with pytest.raises(RequestError, match="one of 0"):
        service.generate("a", SHORT, replica_index=2)
    for count in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="num_replicas"):
            service.scale(count)


def test_while_no_replica_lives_calls_may_be_tried_again(service, provider):
    provider.starts = False
    for replica in list(provider.replicas.values()):
        replica.kill()
    eventually(lambda: not any(each.pid for each in service.health()))
    with pytest.raises(RetryableError, match="no replica of the fleet lives at the moment"):
        service.generate("a", SHORT)
    with pytest.raises(RetryableError, match="collective_rpc: no replica"):
        service.collective_rpc("get_weight_digest")


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_call_goes_to_another_replica_where_one_is_lost_or_may_be_tried_again(
    service, provider, monkeypatch, num_lost
):
    def lose(*_):
        raise EngineDeadError("it was lost")

    for index in range(num_lost):
        monkeypatch.setattr(provider.replicas[index].client, "call", lose)
    if num_lost == 1:
        assert service.get_model_metadata()
        assert service.generate("a", SHORT, use_tqdm=False)[0].finished
        assert service.get_num_unfinished_requests() == 0
        with pytest.raises(RetryableError, match="collective_rpc: a replica was lost before it had answered"):
            service.collective_rpc("get_weight_digest")
    else:
        for call in (service.get_model_metadata, service.get_num_unfinished_requests, partial(service.generate, "a")):
            with pytest.raises(RetryableError, match="a replica was lost before it had answered; the fleet goes on"):
                call()


def test_a_weight_group_is_refused_and_the_error_says_what_to_use(service):
    with pytest.raises(LifecycleError, match="update_weights"):
        service.init_weight_update_group("127.0.0.1", 29500)
    with pytest.raises(LifecycleError, match="use update_weights"):
        service.collective_rpc("init_weight_update_group", args=["127.0.0.1", 29500, 1, 3])


def test_small_facts(service):
    assert service.get_tp_size() == 1
    assert service.get_model_metadata() == {"embed.weight": ("float32", (259, 8))}
    assert 0 < service.get_master_port() < 2**16
    assert service.get_master_address().count(".") == 3


def test_bad_options_are_refused_before_anything_starts(service):
    with pytest.raises(ConfigError, match="Did you mean 'prefix-aware'"):
        RolloutService.from_pretrained("fake", balancer=["prefix_aware"])
    with pytest.raises(ConfigError, match="num_devices=2 and tensor_parallel_size=4 .* mean the same"):
        RolloutService.from_pretrained("fake", num_devices=2, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="from_pretrained takes a path"):
        RolloutService.launch("fake", 2)
    with pytest.raises(ConfigError, match="num_replicas=0"):
        RolloutService.from_pretrained("fake", num_replicas=0)
    with pytest.raises(ConfigError, match="Did you mean 'processes'"):
        RolloutService.from_pretrained("fake", placement="process")
    with pytest.raises(ConfigError, match="give fp32_head"):
        RolloutService.from_pretrained("fake", enable_fp32_output=True)
    with pytest.raises(ConfigError, match="over a FleetClient"):
        RolloutService(make_engine().frontend)


def test_a_service_that_is_shut_down_says_so():
    service, _ = make_service()
    service.shutdown()
    for call in (service.health, service.get_cache_usage, lambda: service.generate("a"), lambda: service.scale(1)):
        with pytest.raises(LifecycleError, match="shut down"):
            call()


def test_encode_pools_prompts_over_replicas(made):
    service, _ = made
    outputs = service.encode(PROMPTS, {"kind": "mean"}, use_tqdm=False)
    expected = [fake_pooled(prompt, PoolingParams(kind="mean")).tolist() for prompt in PROMPTS]
    assert [output.outputs.data.tolist() for output in outputs] == expected
    (there,) = service.encode(PROMPTS[0], use_tqdm=False, replica_index=1)
    assert there.finished and there.outputs.data.tolist() == [PROMPTS[0][-1], 1.0]
    with pytest.raises(RequestError, match="pooling_params"):
        service.encode(PROMPTS, SHORT, use_tqdm=False)
