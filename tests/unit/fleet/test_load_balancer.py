"""`LoadBalancer` over a service and over engines, with fake models."""

from functools import partial

import pytest

from rollout_engine import LLM, ConfigError, EngineDeadError, LifecycleError, LoadBalancer, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from tests.forking import in_fork
from tests.unit.fake_engine import make_engine
from tests.unit.fleet.fake_fleet import make_service

PROMPTS = [[5 + i, 6, 7, 8, 9, 10, 11, 12, 13] for i in range(32)]
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def service():
    made, _ = make_service(3)
    with made:
        yield made


@pytest.fixture
def engines():
    return [make_engine(), make_engine()]


def test_the_same_prefix_goes_to_the_same_replica(service):
    balancer, again = service.create_load_balancer(), LoadBalancer(service)
    chosen = [balancer.select_replica(prompt) for prompt in PROMPTS]
    assert [balancer.select_replica([*prompt[:8], 50 + i]) for i, prompt in enumerate(PROMPTS)] == chosen
    assert [again.select_replica(prompt) for prompt in PROMPTS] == chosen
    assert set(chosen) == {0, 1, 2}
    assert balancer.get_stats().decisions == {"prefix-aware": 64}


def test_without_a_prompt_equally_loaded_replicas_take_turns(service):
    for strategy in ("requests", "round-robin", None):
        balancer = service.create_load_balancer(strategy)
        assert sorted(balancer.select_replica() for _ in range(6)) == [0, 0, 1, 1, 2, 2]
        assert balancer.get_stats().num_requests == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("strategy", ["requests", "kv-cache"])
def test_the_least_loaded_engine_is_chosen(engines, strategy):
    balancer = LoadBalancer(engines, strategy)
    engines[0].add_requests([[5, 6], [5, 7]], LONG)
    for engine in engines:
        engine.step()
    assert [balancer.select_replica() for _ in range(3)] == [1, 1, 1]
    engines[1].add_requests([[5, 6]] * 5, LONG)
    engines[1].step()
    assert [balancer.select_replica() for _ in range(3)] == [0, 0, 0]
    assert balancer.get_stats().num_requests == {0: 2, 1: 5}


def test_an_engine_that_is_gone_is_not_chosen(engines):
    balancer = LoadBalancer(engines, "round-robin")
    assert {balancer.select_replica() for _ in range(4)} == {0, 1}
    engines[0].shutdown()
    assert {balancer.select_replica() for _ in range(4)} == {1}
    engines[1].shutdown()
    with pytest.raises(EngineDeadError, match="none serves"):
        balancer.select_replica()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_it_raises(service, engines):
    balancers = [service.create_load_balancer(), LoadBalancer(engines)]

    def child():
        for balancer in balancers:
            for call in (balancer.select_replica, partial(balancer.select_replica, "a"), balancer.get_stats):
                with pytest.raises(LifecycleError, match="belongs to process"):
                    call()

    in_fork(child)


def test_a_service_that_scales_is_followed():
    service, _ = make_service(2)
    with service:
        balancer = service.create_load_balancer("round-robin")
        assert {balancer.select_replica() for _ in range(4)} == {0, 1}
        service.scale(1)
        assert {balancer.select_replica() for _ in range(4)} == {0}


def test_prompts_of_any_kind_are_read(service):
    balancer = service.create_load_balancer(prefix_length=2)
    ids = service.get_tokenizer().encode("a long text")
    assert balancer.select_replica("a long text") == balancer.select_replica(ids)
    with pytest.raises(RequestError, match="not a list of them"):
        balancer.select_replica(["a", "b"])


@pytest.mark.parametrize("given", [[], "path", [1, 2], None, {0: "a"}])
def test_what_is_no_engine_is_refused(given):
    with pytest.raises(ConfigError, match="service_or_replicas=.*a list of engines"):
        LoadBalancer(given)


def test_an_engine_without_replicas_is_refused(engines):
    for face in (engines[0], LLM.from_engine(engines[0])):
        with pytest.raises(ConfigError, match=f"this {type(face).__name__} has no replicas: give a RolloutService"):
            LoadBalancer(face)


def test_bad_options_are_refused(service):
    with pytest.raises(ConfigError, match="Did you mean 'kv-cache'"):
        service.create_load_balancer("kvcache")
    with pytest.raises(ConfigError, match="prefix_length=0"):
        service.create_load_balancer(prefix_length=0)
    with pytest.raises(ConfigError, match="overload_threshold=0.5"):
        service.create_load_balancer(overload_threshold=0.5)
