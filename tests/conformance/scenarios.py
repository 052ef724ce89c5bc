"""A scenario for each verb: what it does on an engine that runs and is empty, as plain values.

Every client plays each with the same result; then the verb is called in every state. A new verb gets one of its name:

    @scenario(refused_in="asleep dirty")
    def get_num_running(engine):
        return engine.get_num_running()
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from rollout_engine.base.errors import LifecycleError, RequestError, RPCError
from rollout_engine.base.kept_samples import KeptSamples
from rollout_engine.engine.verbs import VERBS
from tests.conformance.adapter_scenarios import ADAPTER
from tests.conformance.running import ENDLESS, SHORT, in_flight, last_of, plain, step_further, told
from tests.conformance.scenario_table import SCENARIOS, call, scenario
from tests.conformance.worker_functions import WRONG_CALLS, add

__all__ = ["ADAPTER", "SCENARIOS", "TRACES", "call"]
TRACES = tempfile.TemporaryDirectory()


@scenario()
def pause_generation(engine):
    with pytest.raises(LifecycleError, match="pause_generation: mode='later'"):
        engine.pause_generation(mode="later")
    before = engine.stats.pause_seconds.count
    for mode in ("abort", "wait", "keep", "keep"):
        engine.pause_generation(mode=mode)
        assert engine.is_paused()
    engine.pause_generation(wait_for_inflight_requests=True, clear_cache=True)
    engine.resume_generation()
    return engine.stats.pause_seconds.count - before


@scenario(refused_in="asleep updating")
def resume_generation(engine):
    engine.resume_generation()
    engine.pause_generation()
    engine.resume_generation()
    engine.resume_generation()
    return told(last_of(engine, "hello", SHORT))


@scenario()
def is_paused(engine):
    found = [engine.is_paused()]
    engine.pause_generation()
    engine.sleep()
    found.append(engine.is_paused())
    engine.wake_up()
    found.append(engine.is_paused())
    engine.resume_generation()
    return [*found, engine.is_paused()]


@scenario(refused_in="frozen")
def wait_for_requests_to_drain(engine):
    engine.add_request("r", "hello", SHORT)
    engine.wait_for_requests_to_drain()
    unfinished = call(engine, "get_num_unfinished_requests")
    (output,) = engine.step()
    engine.wait_for_requests_to_drain(drain_timeout=0.5)
    return unfinished, told(output)


@scenario(refused_in="updating")
def sleep(engine):
    for wrong in (dict(level=3), dict(mode="later")):
        with pytest.raises(LifecycleError, match=f"sleep: {next(iter(wrong))}="):
            engine.sleep(**wrong)
    engine.sleep()
    engine.sleep(level=1, mode="wait")
    found = engine.is_sleeping(), engine.get_metrics().core.state
    engine.wake_up()
    return found, told(last_of(engine, "hello", SHORT))


@scenario(refused_in="updating")
def wake_up(engine):
    with pytest.raises(LifecycleError, match="wake_up: tags=.'heap'"):
        engine.wake_up("heap")
    engine.wake_up()
    engine.sleep()
    found = []
    for tags in (["weights"], "weights", ("kv_cache",), None):
        engine.wake_up(tags)
        found.append(engine.is_sleeping())
    return found


@scenario()
def is_sleeping(engine):
    found = [engine.is_sleeping()]
    engine.sleep()
    found.append(engine.is_sleeping())
    engine.wake_up(["kv_cache"])
    found.append(engine.is_sleeping())
    engine.wake_up()
    return [*found, engine.is_sleeping()]


@scenario()
def reset_prefix_cache(engine):
    prompt = list(range(3, 60))
    assert engine.reset_prefix_cache()
    cached = [last_of(engine, prompt, SHORT).num_cached_tokens for _ in range(2)]
    with in_flight(engine, prompt):
        refused = engine.reset_prefix_cache()
        done = engine.reset_prefix_cache(reset_running_requests=True)
        step_further(engine)
    assert engine.reset_prefix_cache()
    return cached, refused, done, last_of(engine, prompt, SHORT).num_cached_tokens


@scenario()
def reset_mm_cache(engine):
    before = engine.stats.pictures
    assert engine.reset_mm_cache() is None
    with in_flight(engine):
        engine.reset_mm_cache()
        step_further(engine)
    assert engine.stats.pictures == before  # its model takes none
    return told(last_of(engine, "hello", SHORT))


@scenario()
def reset_encoder_cache(engine):
    assert engine.reset_encoder_cache() is None
    with in_flight(engine):
        engine.reset_encoder_cache()
        step_further(engine)
    return told(last_of(engine, "hello", SHORT))


@scenario(refused_in="asleep dirty", digests=[b"0" * 32], arrays=[{}])
def get_picture_features(engine):
    arguments = VERBS["get_picture_features"].bind(([b"0" * 32], [{}]), {})
    with pytest.raises(RequestError, match="takes no pictures"):  # its model; others: tests/integration
        engine.frontend.client.call("get_picture_features", arguments).result()


@scenario(refused_in="asleep dirty", prompt_token_ids=[[5]], completion_token_ids=[[6]])
def score(engine):
    for prompts, completions, match in (
        ([[5]], [[999]], r"completion_token_ids\[0\]"),
        ([[]], [[5]], r"prompt_token_ids\[0\]"),
        ([[5]], [], "completion_token_ids"),
        ([[5]], ["text"], r"completion_token_ids"),
    ):
        with pytest.raises(RequestError, match=match):
            engine.score(prompts, completions)
    with pytest.raises(RequestError, match="temperature"):
        engine.score([[5]], [[6]], temperature=-1)
    with pytest.raises(RequestError, match="routed_experts='those of 1 pairs' is not allowed: must be None"):
        engine.score([[5]], [[6]], routed_experts=[np.zeros((1, 2, 2), np.uint8)])  # its model has no routers
    sampled = last_of(engine, [5, 6, 7], SHORT).outputs[0]
    (scored,) = engine.score([[5, 6, 7]], [sampled.token_ids])
    assert np.array_equal(scored, sampled.logprobs)
    return plain(engine.score([[5, 6, 7], [8]], np.array([[9, 10], [11, 12]]), temperature=0.7))


@scenario(refused_in="asleep dirty", prompt_token_ids=[[5]], completion_token_ids=[[6]])
def score_candidates(engine):
    for candidates, options, match in (
        ([[259]], {}, r"candidate_ids\[0\]\[0\]=259"),
        ([[5], [6]], {}, r"integers \[1, K\]"),
        (None, {"top_k": -1}, "top_k"),
        (None, {"temperature": -1}, "temperature"),
    ):
        with pytest.raises(RequestError, match=match):
            engine.score_candidates([[5]], [[6]], candidates, **options)
    sampled = last_of(engine, [5, 6, 7], SHORT).outputs[0]
    own = engine.score_candidates([[5, 6, 7]], [sampled.token_ids], [[each] for each in sampled.token_ids])
    assert np.array_equal(own.candidates[:, 0], sampled.logprobs) and np.array_equal(own.logprobs, sampled.logprobs)
    many = np.arange(258).reshape(2, 129)
    found = engine.score_candidates([[5, 6, 7], [8]], [[9], [10]], many, top_k=3, temperature=0.7)
    return plain([found.logprobs, found.candidates, found.top_ids, found.top_logprobs])


@scenario(method="get_memory_usage")
def collective_rpc(engine):
    for wrong, match in (
        (dict(method="nothing"), "Unknown method"),
        (dict(method="numbers", args=[{"start": "a", "stop": 2}]), "numbers"),
        (dict(method="numbers", kwargs={"between": 1}), "between"),
        (dict(method="fail"), "KeyError: 'of the extension'"),
        (dict(method="__init__"), "Unknown method"),
        (dict(method=3), "method must be a name"),
        (dict(method="count", args=3), "args must be a list"),
        (dict(method="count", kwargs=[3]), "kwargs must be a dict"),
        (dict(method="count", timeout=0), "timeout must be seconds"),
    ):
        with pytest.raises(RPCError, match=match):
            engine.collective_rpc(**wrong)
    (doubled,) = engine.collective_rpc("double", args=[np.arange(3, dtype=np.float32)])
    (numbers,) = engine.collective_rpc("numbers", 5, [{"start": 1, "stop": 9}], {"step": 3})
    return plain(doubled), numbers, engine.collective_rpc("get_weight_digest")


@scenario(method=lambda worker: None)
def call_function(engine):
    try:
        found = engine.collective_rpc(add, args=(1,), kwargs={"b": 2})
    except LifecycleError as error:
        assert "collective_rpc: functions do not cross processes" in str(error)
        return [engine.frontend.client.info.vocab_size + 3]
    for wrong, match in WRONG_CALLS:
        with pytest.raises(RPCError, match=match):
            engine.collective_rpc(**wrong)
    return found


@scenario(refused_in="asleep dirty updating", fn=lambda module: None)
def apply_model(engine):
    try:
        return engine.apply_model(lambda module: [name for name, _ in module.named_parameters()])[0][0]
    except LifecycleError as error:  # functions do not cross processes
        assert "apply_model: functions do not cross processes" in str(error)
        return "model.embed_tokens.weight"


@scenario()
def get_model_metadata(engine):
    return engine.get_model_metadata()


@scenario(names=[])
def get_missing_weights(engine):
    every = call(engine, "get_missing_weights", names=[])
    assert len(every) > 3 and call(engine, "get_missing_weights", names=["unknown", *every[1:]]) == every[:1]
    return every


@scenario(names=[])
def get_own_names(engine):
    return call(engine, "get_own_names", names=["unknown", "norm.weight", "model.norm.weight"])


@scenario(names=[])
def get_unused_names(engine):
    return call(engine, "get_unused_names", names=["unknown", "rotary_emb.inv_freq", "model.norm.weight"])


@scenario()
def get_cache_usage(engine):
    found = [engine.get_cache_usage()]
    with in_flight(engine, list(range(3, 60))):
        assert engine.get_cache_usage() > 3 / 2048
    return found


@scenario()
def get_num_unfinished_requests(engine):
    engine.pause_generation()
    counts = [call(engine, "get_num_unfinished_requests")]
    for request_id in ("a", "b"):
        engine.add_request(request_id, "hello", ENDLESS)
        counts.append(call(engine, "get_num_unfinished_requests"))
    engine.abort_request(["a", "b"], discard=True)
    engine.resume_generation()
    return [*counts, call(engine, "get_num_unfinished_requests")]


@scenario()
def check_health(engine):
    before = engine.check_health()
    last_of(engine, "hello", SHORT)
    after = engine.check_health()
    assert after.pid == before.pid and after.policy_version == engine.policy_version
    return after.num_unfinished_requests, after.num_steps > before.num_steps


@scenario()
def check_integrity(engine):
    with in_flight(engine):
        return engine.check_integrity()


@scenario(directory=TRACES.name)
def start_profile(engine):
    with tempfile.TemporaryDirectory() as directory:
        for wrong, match in (
            (dict(), "start_profile: directory=None .*EngineConfig.profiler_dir=...."),
            (dict(directory=__file__), "start_profile: directory='.*scenarios.py' is not allowed: .* can write to"),
            (dict(directory=directory, num_steps=0), "start_profile: num_steps=0"),
        ):
            with pytest.raises(RequestError, match=match):
                engine.start_profile(**wrong)
        engine.start_profile(directory, num_steps=3)
        with pytest.raises(LifecycleError, match="start_profile: a profile is running .*call stop_profile"):
            engine.start_profile(directory)
        last_of(engine, "hello", SHORT)
        paths = engine.stop_profile()
        assert sorted(map(Path, paths)) == sorted(Path(directory).iterdir())
        return max(steps_in(path) for path in paths)


@scenario(refused_in="asleep dirty updating", path=f"{TRACES.name}/state")
def save_sharded_state(engine):
    with tempfile.TemporaryDirectory() as directory:
        for wrong in (3, "", directory + "/file/state"):
            Path(directory, "file").touch()
            with pytest.raises(RequestError, match="save_sharded_state: path=.* is not allowed"):
                engine.save_sharded_state(wrong)
        engine.save_sharded_state(Path(directory) / "state")
        state = json.loads(Path(directory, "state/sharded.json").read_text())
        return [shard["digest"] for shard in state["shards"]]


@scenario()
def stop_profile(engine):
    with pytest.raises(LifecycleError, match="stop_profile: no profile is running"):
        engine.stop_profile()
    with tempfile.TemporaryDirectory() as directory:
        engine.start_profile(Path(directory) / "made", with_stack=True, record_shapes=True, profile_memory=True)
        last_of(engine, "hello", SHORT)
        found = max(steps_in(path) for path in engine.stop_profile())
    with pytest.raises(LifecycleError, match="stop_profile: no profile is running"):
        engine.stop_profile()
    return found >= 12


def steps_in(path):
    """Steps that a trace shows."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    return sum(event["name"].startswith("step ") for event in events if event.get("cat") == "user_annotation")


@scenario()
def get_kept_samples(engine):
    samples = call(engine, "get_kept_samples")  # none: it does not draft
    return [plain(getattr(samples, name)) for name in ("prompt_keys", "num_samples", "lengths", "token_ids")]


@scenario(samples=KeptSamples.of([]))
def add_kept_samples(engine):
    with pytest.raises(RequestError, match="add_kept_samples: the samples have token 999; must be tokens of the model"):
        call(engine, "add_kept_samples", samples=KeptSamples.of([(bytes(16), [[5, 999]])]))
    call(engine, "add_kept_samples", samples=KeptSamples.of([(bytes(16), [[5, 6, 7, 8], [9]])]))
    return len(call(engine, "get_kept_samples").lengths)


@scenario()
def get_core_metrics(engine):
    before = call(engine, "get_core_metrics").counters.num_tokens_sampled
    sampled = len(last_of(engine, "hello", SHORT).outputs[0].token_ids)
    metrics = call(engine, "get_core_metrics")
    return metrics.state, metrics.counters.num_tokens_sampled - before - sampled


@scenario(refused_in="paused asleep dirty frozen", verb="generate")
def require_running(engine):
    return call(engine, "require_running", verb="generate")


@scenario(peers=[])
def meet_kv_peers(engine):
    return call(engine, "meet_kv_peers", peers=[{"name": "another"}])  # without a connector nothing meets it
