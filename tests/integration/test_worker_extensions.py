"""Methods of worker extensions, called on engines in this process and in their own: one result per rank."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    DirtyWeightsError,
    LifecycleError,
    RolloutPolicy,
    RPCError,
    RPCTimeoutError,
    SamplingParams,
)
from rollout_engine.base.threads import SWITCH_SECONDS
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync.manifest import describe

HERE = Path(__file__).parent
OPTIONS = dict(num_kv_blocks=2048, num_threads=1, worker_extensions=["sample_extensions:Sample"])
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=3, logprobs=0, detokenize=False)
ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)
"""For a request that goes on until somebody ends it: a minute's work."""


@pytest.fixture(scope="module", autouse=True)
def samples_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def llm(checkpoint, samples_on_the_path):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def remote(checkpoint, samples_on_the_path):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.fixture(params=["in process", "own process"])
def call(request):
    """`collective_rpc` of either engine, as a blocking function."""
    if request.param == "in process":
        return request.getfixturevalue("llm").collective_rpc
    engine = request.getfixturevalue("remote")
    return lambda *args, **kwargs: asyncio.run(engine.collective_rpc(*args, **kwargs))


def test_threads_give_way_early_in_an_engine_s_own_process_and_as_python_says_in_the_caller_s(llm, remote):
    """Weights that are taken on one thread must not keep the steps of another waiting."""
    (own,) = asyncio.run(remote.collective_rpc("switch_interval"))
    assert own == pytest.approx(SWITCH_SECONDS)
    assert llm.collective_rpc("switch_interval") == [sys.getswitchinterval()] == [pytest.approx(0.005)]


def test_the_stock_extensions_answer_everywhere(call, llm):
    weights = {name: tensor.detach() for name, tensor in llm.apply_model(lambda m: dict(m.state_dict()))[0].items()}
    (norms,) = call("get_weight_norms")
    assert norms.keys() <= weights.keys() and len(norms) > 10
    assert norms["model.norm.weight"] == pytest.approx(weights["model.norm.weight"].norm().item())
    (digests,) = call("get_tensor_digests", args=[["model.norm.weight"]])
    assert digests == {"model.norm.weight": describe("", weights["model.norm.weight"]).digest}
    (scores,) = call("score_tokens", args=([[5, 6, 7], [8]], [[9, 10], []]))
    assert all(map(np.array_equal, scores, llm.score([[5, 6, 7], [8]], [[9, 10], []])))
    assert call("get_block_tables") == [{}]
    (usage,) = call("get_memory_usage")
    assert usage.keys() == {"weights", "derived", "kv_cache", "process"}
    assert usage["weights"] > 0 and usage["derived"] >= 0 and usage["process"] > usage["weights"]


def test_a_function_of_apply_model_that_exits_fails_its_call(llm):
    with pytest.raises(RPCError, match=r"apply_model raised SystemExit: 5\."):
        llm.apply_model(lambda module: sys.exit(5))
    assert llm.apply_model(lambda module: 1) == [1]


@pytest.mark.parametrize(
    "completion, temperature, message",
    [([300], 1.0, r"token ids outside \[0, 259\)"), ([5] * 40_000, 1.0, "at most"), ([5], -1.0, "temperature=-1.0")],
)
def test_what_cannot_be_scored_is_refused(call, completion, temperature, message):
    with pytest.raises(RPCError, match=message):
        call("score_tokens", args=([[5]], [completion], temperature))


def test_extensions_live_where_the_model_runs(llm, remote):
    assert llm.collective_rpc("pid") == [os.getpid()]
    assert asyncio.run(remote.collective_rpc("pid")) == [remote.frontend.client.pid] != [os.getpid()]


def test_structs_arrive_as_what_the_method_declares(call):
    assert call("numbers", args=[{"start": 1, "stop": 8}], kwargs={"step": 3}) == [[1, 4, 7]]
    (middle,) = call("middle", kwargs={"within": {"start": 0, "stop": 9}})
    assert msgspec.to_builtins(middle) == {"start": 4, "stop": 5}
    with pytest.raises(RPCError, match=r"numbers: Expected `int`, got `str` - at `\$.within.stop`"):
        call("numbers", args=[{"start": 1, "stop": "8"}])


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_arrays_and_tensors_go_both_ways(call, size):
    array, tensor = np.arange(size, dtype=np.float32), torch.full((size,), 1.5, dtype=torch.bfloat16)
    (result,) = call("double", args=[array], kwargs={"tensor": tensor})
    assert np.array_equal(result["array"], array * 2)
    assert result["tensor"].shape == (size,) and (result["tensor"] == 3).all()
    (added,) = call("add_in_place", args=[array, torch.ones(size)])
    assert torch.equal(added, torch.from_numpy(array) + 1)


@pytest.mark.parametrize(
    "method, args, message",
    [
        ("cuont", [], "Unknown method of worker extensions 'cuont'. Did you mean 'count'"),
        ("__init__", [], "Unknown method"),
        ("_bind", [], "Unknown method"),
        ("calls", [], "Unknown method"),
        ("double", [1], r"double: Expected `ndarray`, got `int` - at `\$.array`"),
        ("count", [1], "count: takes 0 arguments, 1 came"),
        ("hold", [1], r"hold: Expected `str`, got `int` - at `\$.gate`"),
        (3, [], "method must be a name"),
        ("count", 3, "args must be a list or a tuple"),
    ],
)
def test_a_call_that_cannot_be_is_refused_and_nothing_runs(call, method, args, message):
    (before,) = call("count")
    with pytest.raises(RPCError, match=message) as caught:
        call(method, args=args)
    assert caught.value.rank is None and not caught.value.traceback
    assert call("count") == [before + 1]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_timeout_is_seconds(call, timeout):
    with pytest.raises(RPCError, match="timeout must be seconds, more than 0, or None"):
        call("count", timeout)


def test_an_error_carries_rank_and_the_traceback_there(call):
    with pytest.raises(RPCError, match="fail failed on rank 0: KeyError: 'of the extension'") as caught:
        call("fail")
    assert (caught.value.method, caught.value.rank) == ("fail", 0)
    assert 'raise KeyError("of the extension")' in caught.value.traceback
    assert "sample_extensions.py" in caught.value.traceback


def test_a_call_in_progress_at_its_deadline_goes_on_to_its_end(call, tmp_path):
    (before,) = call("count")
    for timeout in (0.05, 0.5, 5.0, 50.0):  # on a busy machine it may not begin in time
        gate = tmp_path / f"{timeout}"
        with pytest.raises(RPCTimeoutError, match=f"hold: no result within {timeout:g} s") as late:
            call("hold", timeout, [str(gate)])
        has_begun = begun(gate)
        gate.touch()
        if has_begun:
            break
    assert "it goes on to its end" in str(late.value)
    (count,) = call("count")
    assert count == before + len(list(tmp_path.glob("*.begun"))) + 1
    assert call("hold", 600.0, [str(gate)]) == [count + 1]


def begun(gate):
    """Whether `hold` has begun."""
    return gate.with_name(f"{gate.name}.begun").exists()


def test_a_call_that_has_not_begun_at_its_deadline_never_does(remote, tmp_path):
    gate = tmp_path / "gate"

    async def run():
        (before,) = await remote.collective_rpc("count")
        holding = asyncio.create_task(remote.collective_rpc("hold", args=[str(gate)]))
        while not begun(gate):
            await asyncio.sleep(0.01)
        with pytest.raises(RPCTimeoutError, match="count: no result within 0.1 s"):
            await remote.collective_rpc("count", 0.1)
        gate.touch()
        assert await holding == [before + 1]
        assert await remote.collective_rpc("count") == [before + 2]

    asyncio.run(run())


def test_in_process_a_call_waits_for_the_step_boundary_and_gives_up_there(llm, tmp_path):
    gate = tmp_path / "gate"
    (before,) = llm.collective_rpc("count")
    holding = threading.Thread(target=llm.collective_rpc, args=("hold", None, [str(gate)]))
    holding.start()
    while not begun(gate):
        time.sleep(0.01)
    with pytest.raises(RPCTimeoutError, match="it had not begun, and never will"):
        llm.collective_rpc("count", 0.1)
    gate.touch()
    holding.join()
    assert llm.collective_rpc("count") == [before + 2]


def test_what_cannot_cross_processes_is_named(remote):
    with pytest.raises(RPCError, match="double: function has no place in a call between processes"):
        asyncio.run(remote.collective_rpc("double", args=[lambda: 1]))
    with pytest.raises(RPCError, match="unsendable ran, but its result cannot travel: Sample has no place"):
        asyncio.run(remote.collective_rpc("unsendable"))
    with pytest.raises(RPCError, match="double: it takes 276824517 and may take 268435456 bytes in all"):
        asyncio.run(remote.collective_rpc("double", args=[np.zeros(33 << 20)]))
    assert asyncio.run(remote.collective_rpc("double", args=[np.ones(1)]))[0]["array"].tolist() == [2]


def test_calls_between_steps_do_not_change_what_requests_sample(llm, remote):
    (expected,) = llm.generate([[5, 6, 7]], LONG, use_tqdm=False)

    async def run():
        outputs = []
        async for output in remote.generate([5, 6, 7], LONG):
            outputs.append(output)
            await remote.collective_rpc("get_block_tables")
        return outputs[-1]

    ours = asyncio.run(run())
    assert ours.outputs[0].token_ids == expected.outputs[0].token_ids
    assert np.array_equal(ours.outputs[0].logprobs, expected.outputs[0].logprobs)


def test_a_call_finds_the_requests_that_run(remote):
    async def run():
        endless = remote.generate([5, 6, 7], ENDLESS)
        await anext(endless)
        (tables,) = await remote.collective_rpc("get_block_tables")
        await endless.aclose()
        return tables

    (blocks,) = asyncio.run(run()).values()
    assert len(blocks) >= 1


def test_block_tables_grow_with_the_sequences_and_end_with_them(llm):
    engine = llm.llm_engine
    engine.add_request("grows", [5] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    ids, lengths = engine.get_sequence_ids("grows"), []
    while engine.has_unfinished_requests():
        engine.step()
        (tables,) = llm.collective_rpc("get_block_tables")
        assert list(tables) == ids
        lengths += [len(blocks) for blocks in tables.values()]
    assert lengths[0] == 2 and lengths[-1] == 4 and lengths == sorted(lengths)
    llm.collective_rpc("score_tokens", args=([[5]], [[6]]))
    engine.step()
    assert llm.collective_rpc("get_block_tables") == [{}]


def test_memory_falls_asleep_and_wakes_up(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8), use_tqdm=False)
        llm.update_weights(tiny_model(seed=1))
        (awake,) = llm.collective_rpc("get_memory_usage")
        assert all(awake.values())
        llm.sleep()
        (asleep,) = llm.collective_rpc("get_memory_usage")
        assert asleep["derived"] == 0 and asleep["kv_cache"] < awake["kv_cache"] / 2
        assert asleep["weights"] == awake["weights"]
        llm.wake_up()
        llm.sleep(level=2)
        (forgotten,) = llm.collective_rpc("get_memory_usage")
        assert forgotten["weights"] < awake["weights"] / 2
        with pytest.raises(DirtyWeightsError, match="incomplete"):
            llm.collective_rpc("get_weight_norms")


def test_a_function_on_the_model_may_read(llm):
    assert llm.apply_model(lambda module: module.config.vocab_size) == [259]
    with pytest.raises(ZeroDivisionError):
        llm.apply_model(lambda module: 1 / 0)


def test_a_function_that_writes_weights_leaves_the_engine_dirty_until_an_update(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        weights = {n: t.clone() for n, t in policy.apply_model(lambda m: m.state_dict())[0].items()}
        with torch.no_grad(), pytest.raises(DirtyWeightsError, match="has written to model.norm.weight"):
            policy.apply_model(lambda module: module.model.norm.weight.mul_(2))
        with pytest.raises(DirtyWeightsError):
            policy.rollout([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(DirtyWeightsError):
            policy.apply_model(lambda module: None)
        policy.update_weights(weights)
        policy.rollout([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_policy_over_an_engine_in_its_own_process_calls_too(remote, tmp_path):
    policy = RolloutPolicy(remote)
    assert policy.collective_rpc("pid") == [remote.frontend.client.pid]
    with pytest.raises(RPCTimeoutError):
        policy.collective_rpc("hold", 0.05, [str(tmp_path / "gate")])
    (tmp_path / "gate").touch()
    with pytest.raises(LifecycleError, match="functions do not cross processes"):
        policy.apply_model(lambda module: None)


@pytest.mark.slow
def test_an_extension_that_cannot_be_had_stops_the_start(checkpoint):
    for start in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match="'sample_extensions:Absent' cannot be loaded: AttributeError"):
            start(checkpoint, num_kv_blocks=64, worker_extensions=["sample_extensions:Absent"])


def test_an_engine_that_is_shut_down_answers_no_call(checkpoint):
    llm = LLM(checkpoint, **OPTIONS)
    llm.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        llm.collective_rpc("count")
    with pytest.raises(LifecycleError, match="shut down"):
        llm.apply_model(lambda module: None)


def test_watched_layers_show_every_output_and_change_no_bit(checkpoint):
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, logprobs=0)
    with LLM(checkpoint, num_kv_blocks=64, num_threads=1) as llm:
        (expected,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        seen = []
        worker = llm.frontend.client.driver.executor.worker
        stop = worker.watch_layers(lambda layer, hidden: seen.append((layer, tuple(hidden.shape))))
        llm.reset_prefix_cache()
        (watched,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        stop()
        stop()
        (after,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    width = worker.module.config.hidden_size
    num_layers = worker.module.config.num_hidden_layers
    assert seen[:num_layers] == [(layer, (3, width)) for layer in range(num_layers)]
    assert seen[num_layers:] == [(layer, (1, width)) for _ in range(11) for layer in range(num_layers)]
    for result in (watched, after):
        assert result.outputs[0].token_ids == expected.outputs[0].token_ids
        assert np.array_equal(result.outputs[0].logprobs, expected.outputs[0].logprobs)
