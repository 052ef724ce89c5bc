"""Weight updates do the same over every client: version, digest, spans and tokens, and what a failure leaves."""

import pytest
import torch

from rollout_engine import SamplingParams
from rollout_engine.base.errors import (
    ChecksumError,
    DirtyWeightsError,
    DrainTimeoutError,
    LifecycleError,
    ManifestMismatchError,
    StaleVersionError,
    WeightUpdateError,
)
from rollout_engine.testing import tiny_model
from sync import publish
from tests.conformance.running import ENDLESS, SHORT, bring_back, ended, in_flight, last_of, step_further, told, weights

NOT_A_NUMBER = {"model.norm.weight": torch.full((64,), float("nan"))}


@pytest.fixture
def engine(engine):
    """It has the checkpoint's weights again for the next test."""
    yield engine
    bring_back(engine)
    engine.update_weights(weights(0))


def digest(engine):
    return engine.collective_rpc("get_weight_digest")[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("staging", ["shadow", "inplace"])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_new_weights_serve_and_what_is_in_flight_keeps_waits_or_ends(engine, same, mode, staging):
    before = engine.policy_version
    params = ENDLESS if mode != "wait" else SamplingParams(max_tokens=300, ignore_eos=True, seed=3, detokenize=False)
    with in_flight(engine, params=params) as request_id:
        report = engine.update_weights(weights(1), mode=mode, staging=staging)
        assert report.version == engine.policy_version == engine.check_health().policy_version == before + 1
        assert report.num_in_flight == (mode == "keep")
        if mode == "keep":
            step_further(engine)
            engine.abort_request(request_id)
        sample = ended(engine)
    versions = [span.policy_version - before for span in sample.version_spans]
    assert versions == ([0, 1] if mode == "keep" else [0])
    assert sample.finish_reason == ("length" if mode == "wait" else "abort")
    after = last_of(engine, "hello", SHORT)
    assert [span.policy_version - before for span in after.outputs[0].version_spans] == [1]
    assert report.digest == digest(engine)
    same([report.digest, report.num_tensors, report.num_bytes, report.staging, told(after)])


def test_recomputed_kv_is_of_the_new_weights(engine):
    before = engine.policy_version
    with in_flight(engine) as request_id:
        engine.update_weights(weights(1), kv="recompute")
        step_further(engine)
        engine.abort_request(request_id)
        spans = ended(engine).version_spans
    assert [(s.policy_version - before, s.kv_min_version - before) for s in spans] == [(0, 0), (1, 1)]


def test_an_update_with_few_changes_sends_those_and_brings_all(engine, same):
    new = weights(1)
    engine.update_weights(new)
    new["model.norm.weight"] = new["model.norm.weight"] * 2
    few, none, whole = [engine.update_weights(new, delta=delta) for delta in (True, True, False)]
    sizes = [report.num_bytes_sent for report in (few, none, whole)]
    assert sizes == [new["model.norm.weight"].nbytes, 0, whole.num_bytes]
    assert few.digest == none.digest == whole.digest == digest(engine)
    same([whole.digest, sizes, told(last_of(engine, "hello", SHORT))])


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind_of_source", ["dict", "iterator", "checkpoint", "store", "part"])
def test_every_kind_of_source_brings_the_same_weights(engine, same, tmp_path, kind_of_source):
    new, version = weights(1), engine.policy_version + 3
    source = {"dict": new, "iterator": iter(new.items()), "part": {"model.norm.weight": new["model.norm.weight"] * 2}}
    if kind_of_source == "checkpoint":
        tiny_model(seed=1).save_pretrained(tmp_path)
    elif kind_of_source == "store":
        publish(tmp_path, new, version)
    report = engine.update_weights(
        source.get(kind_of_source, tmp_path), version=version, partial=kind_of_source == "part"
    )
    assert report.version == version
    same([report.digest, told(last_of(engine, "hello", SHORT))])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "change, options, error, match",
    [
        (NOT_A_NUMBER, {}, ChecksumError, "NaN"),
        ({"model.norm.weight": torch.ones(3)}, {}, ManifestMismatchError, "model.norm.weight"),
        ({"more": torch.ones(3)}, {}, ManifestMismatchError, "more"),
        ({}, dict(version=-1), WeightUpdateError, "ersion"),
        ({}, dict(mode="later"), WeightUpdateError, "mode='later'"),
        ({}, dict(kv="drop"), WeightUpdateError, "kv='drop'"),
        ({}, dict(staging="heap"), WeightUpdateError, "staging='heap'"),
        ({}, dict(timeout=0), WeightUpdateError, "timeout=0"),
        ({}, dict(transport="smoke"), WeightUpdateError, "smoke"),
        ({}, dict(version="new"), WeightUpdateError, "version"),
    ],
)
def test_refused_weights_change_nothing(engine, change, options, error, match):
    version, before = engine.policy_version, (digest(engine), told(last_of(engine, "hello", SHORT)))
    with pytest.raises(error, match=match):
        engine.update_weights(weights(1) | change, **options)
    assert engine.policy_version == engine.check_health().policy_version == version
    assert (digest(engine), told(last_of(engine, "hello", SHORT))) == before


def test_an_older_version_is_refused_and_the_same_again_is_no_update(engine):
    report = engine.update_weights(weights(1))
    with pytest.raises(StaleVersionError):
        engine.update_weights(weights(2), version=report.version)
    again = engine.update_weights(weights(1), version=report.version)
    assert (again.num_bytes, again.digest) == (0, report.digest)


@pytest.mark.quick(1)
def test_requests_that_do_not_finish_in_time_go_on_under_the_old_weights(engine):
    version = engine.policy_version
    with in_flight(engine):
        with pytest.raises(DrainTimeoutError, match="update_weights: 1 requests are still in flight"):
            engine.update_weights(weights(1), mode="wait", timeout=1.5)
        step_further(engine)
        assert engine.policy_version == version


def test_a_failure_in_place_is_dirty_until_a_complete_update(engine, same):
    with in_flight(engine) as request_id:
        with pytest.raises(DirtyWeightsError, match="NaN"):
            engine.update_weights(weights(1) | NOT_A_NUMBER, staging="inplace")
        assert engine.get_metrics().core.state == "DIRTY"
        for refused in (
            lambda: engine.score([[5]], [[6]]),
            lambda: last_of(engine, "hello", SHORT),
            lambda: engine.update_weights({"model.norm.weight": torch.ones(64)}, partial=True),
        ):
            with pytest.raises(DirtyWeightsError, match="incomplete|Send a complete update"):
                refused()
        assert engine.is_unfinished(request_id)
        engine.update_weights(weights(1))
        step_further(engine)
    same([digest(engine), told(last_of(engine, "hello", SHORT))])


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_there_is_nothing_to_update_and_awake_what_was_forgotten_has_to_come(engine, same, level):
    engine.sleep(level=level)
    with pytest.raises(LifecycleError, match="update_weights: not possible while the engine is ASLEEP"):
        engine.update_weights(weights(1))
    engine.wake_up(["weights"])
    if level == 2:
        with pytest.raises(DirtyWeightsError, match=r"sleep\(level=2\) forgot them"):
            engine.score([[5]], [[6]])
        engine.update_weights(weights(0))
    engine.wake_up(["kv_cache"])
    same([digest(engine), told(last_of(engine, "hello", SHORT))])
