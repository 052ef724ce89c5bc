"""What Prometheus scrapes after a scripted run, figure by figure, against what was done."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine import (
    AsyncLLM,
    EngineConfig,
    LLMEngine,
    ManifestMismatchError,
    PrometheusLogger,
    RolloutPolicy,
    SamplingParams,
    StaleVersionError,
)
from rollout_engine.testing import tiny_checkpoint, tiny_model

BLOCK_SIZE = 16
PROMPT = list(range(3, 3 + BLOCK_SIZE))
OTHER = list(range(60, 60 + 2 * BLOCK_SIZE + 1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def scrape(registry):
    """What a scrape shows, by name without the prefix; of labelled samples (name, label)."""

    def read():
        figures = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = [value for name, value in sorted(sample.labels.items()) if name != "engine"]
                name = sample.name.removeprefix("rollout_engine_")
                figures[(name, *labels) if labels else name] = sample.value
        return figures

    return read


@pytest.fixture
def engine(checkpoint, registry):
    config = EngineConfig(
        model=str(checkpoint), block_size=BLOCK_SIZE, num_kv_blocks=8, log_stats=False, skip_tokenizer_init=True
    )
    with LLMEngine.from_config(config, stat_loggers=[PrometheusLogger(registry=registry)]) as engine:
        yield engine


def params(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **changes)


def drain(engine, num_steps=None):
    while engine.has_unfinished_requests() and num_steps != 0:
        engine.step()
        num_steps = None if num_steps is None else num_steps - 1


def weights(seed):
    return tiny_model(seed=seed).state_dict()


def test_a_scrape_tells_what_a_scripted_run_did(engine, scrape):
    for name in "ab":  # 2 x 76 tokens in 8 blocks of 16: one is preempted after 64 tokens, under version 2
        engine.add_request(name, [*PROMPT[:-1], ord(name)], params(60))
    drain(engine, 5)
    reports = [engine.update_weights(weights(1))]
    drain(engine, 5)
    engine.pause_generation(mode="keep")
    assert scrape()["running"] == 0
    engine.resume_generation()
    with pytest.raises(ManifestMismatchError):
        engine.update_weights({"lm_head.weight": weights(2)["lm_head.weight"]})
    reports.append(engine.update_weights(weights(2)))
    with pytest.raises(StaleVersionError):
        engine.update_weights(weights(3), version=1)
    drain(engine)

    seen = scrape()
    assert (seen["policy_version"], seen["running"]) == (2, 1)
    assert seen["update_bytes_total"] == sum(report.num_bytes for report in reports) > 0
    assert seen["update_seconds_count"] == seen["update_stall_seconds_count"] == 2
    assert seen["update_seconds_sum"] == pytest.approx(sum(report.seconds for report in reports))
    assert seen["update_stall_seconds_sum"] == pytest.approx(sum(report.stall_seconds for report in reports))
    assert seen["update_failures_total", "ManifestMismatchError"] == 1
    assert seen["update_failures_total", "StaleVersionError"] == 1
    assert (seen["pause_seconds_count"], seen["pause_seconds_sum"]) == (1, engine.stats.last_pause_seconds)
    assert seen["samples_finished_total", "length"] == 2
    assert seen["tokens_sampled_total"] == 2 * 60

    assert seen["preemptions_total"] == 1
    assert seen["tokens_recomputed_total"] == 4 * BLOCK_SIZE  # full blocks: a fifth was not to be had
    assert seen["tokens_computed_total"] == 2 * (16 + 60 - 1) + seen["tokens_recomputed_total"]
    assert seen["tokens_cached_total"] == 0  # its own blocks were computed under three versions
    assert seen["tokens_looked_up_total"] == 2 * 16 + 4 * BLOCK_SIZE + 1
    assert seen["staleness_versions_sum"] == 2 + 2
    assert seen["staleness_versions_bucket", "1.0"] == 0
    assert seen["staleness_versions_bucket", "2.0"] == seen["staleness_versions_count"] == 2


def test_prefixes_hit_under_the_live_version_alone(engine, scrape):
    for name in ("first", "again"):
        engine.add_request(name, OTHER, params(1))
        drain(engine)
    assert (scrape()["tokens_looked_up_total"], scrape()["tokens_cached_total"]) == (2 * 33, 32)
    engine.update_weights(weights(1))
    engine.add_request("newer", OTHER, params(1))
    drain(engine)
    assert (scrape()["tokens_looked_up_total"], scrape()["tokens_cached_total"]) == (3 * 33, 32)
    assert scrape()["tokens_recomputed_total"] == 0
    assert scrape()["staleness_versions_bucket", "0.0"] == 3


def test_a_rollout_is_as_stale_as_its_oldest_token_when_it_is_handed_out(engine, scrape):
    policy = RolloutPolicy(engine)

    async def run():
        groups = policy.arollout([PROMPT, OTHER], [params(2), params(8)], num_samples=2)
        await anext(groups)
        await asyncio.to_thread(policy.update_weights, weights(1))
        await anext(groups)
        await groups.aclose()

    asyncio.run(run())
    seen = scrape()
    assert (seen["rollout_staleness_versions_count"], seen["rollout_staleness_versions_sum"]) == (4, 2)


@pytest.mark.slow
def test_an_engine_in_its_own_process_shows_the_same_figures(checkpoint, registry, scrape):
    logger = PrometheusLogger(registry=registry)

    async def run(engine):
        report = await engine.update_weights(weights(1))
        with pytest.raises(StaleVersionError):
            await engine.update_weights(weights(2), version=1)
        await engine.pause_generation()
        await engine.resume_generation()
        async for _ in engine.generate(PROMPT, params(4)):
            pass
        return report

    with AsyncLLM(checkpoint, num_kv_blocks=8, num_threads=1, log_stats=False, stat_loggers=[logger]) as engine:
        report = asyncio.run(run(engine))
        seen = scrape()
    assert (seen["policy_version"], seen["update_seconds_count"], seen["pause_seconds_count"]) == (1, 1, 1)
    assert seen["update_bytes_total"] == report.num_bytes
    assert seen["update_stall_seconds_sum"] == pytest.approx(report.stall_seconds)
    assert seen["update_failures_total", "StaleVersionError"] == 1
    assert (seen["staleness_versions_count"], seen["staleness_versions_sum"]) == (1, 0)
