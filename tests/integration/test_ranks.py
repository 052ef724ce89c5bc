"""A model cut over ranks: the tokens, log-probs and digests of one process, from a part of the memory in each."""

import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_engine import LLM, EngineConfig, PoolingParams, SamplingParams
from rollout_engine.base.errors import (
    ConfigError,
    DirtyWeightsError,
    EngineDeadError,
    LifecycleError,
    RolloutEngineError,
    RPCError,
)
from rollout_engine.execution import part_weights
from rollout_engine.execution.team_weights import TeamWeights
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint, tiny_model
from sync.manifest import describe_all, total_digest

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
_RANK_MODULE = "rollout_engine.execution.rank_main"
STEM = [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 12, 13, 14]
PROMPTS = [{"prompt_token_ids": STEM * times} for times in (1, 2, 5)] + [{"prompt_token_ids": [7, 8]}]
SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, n=3, logprobs=0, seed=5)
TRUNCATED = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.8, logprobs=2, prompt_logprobs=0, seed=7)


def started(path, num_ranks, **options):
    """An engine whose pool is so small that sequences are preempted."""
    settings = dict(skip_tokenizer_init=True, num_kv_blocks=12, max_num_batched_tokens=48, log_stats=False)
    return LLM(str(path), **(settings | dict(tensor_parallel_size=num_ranks) | options))


def plain(value):
    """A result in a form that can be compared: without ids and times."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else repr(value)


def results_of(engine, params):
    found = engine.generate(PROMPTS, params, use_tqdm=False)
    fields = ("token_ids", "logprobs", "top_logprobs", "kept_logprob_mass", "finish_reason")
    samples = [[plain(getattr(c, field, None)) for field in fields] for r in found for c in r.outputs]
    return samples, [plain(r.prompt_logprobs) for r in found]


def all_of(engine, architecture, **fields):
    """What an engine answers: samples, scores, the same after updates and sleeps, and digests.

    `fields`: of the model's configuration, where they are others than those of a tiny model.
    """
    found = [results_of(engine, SAMPLED), results_of(engine, TRUNCATED)]
    found.append([scores.tobytes() for scores in engine.score([STEM, [7]], [[4, 5, 6], [8]])])
    report = engine.update_weights(tiny_model(architecture, seed=3, **fields))
    found += [report.digest, results_of(engine, SAMPLED), engine.collective_rpc("get_weight_digest")[0]]
    engine.sleep(level=1)
    engine.wake_up()
    found.append(results_of(engine, SAMPLED))
    engine.sleep(level=2)
    engine.wake_up()
    engine.update_weights(tiny_model(architecture, seed=4, **fields), staging="inplace")
    return [*found, results_of(engine, SAMPLED), engine.collective_rpc("get_weight_digest")[0]]


def num_preemptions(engine):
    return engine.llm_engine.stats.num_preemptions


@contextmanager
def running(path, num_ranks, **options):
    engine = started(path, num_ranks, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def engine(checkpoint):
    with running(checkpoint, 2, worker_extensions=("tests.integration.sample_extensions:RankFaults",)) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(checkpoint):
    """The same engine on one process."""
    with running(checkpoint, 1) as engine:
        yield engine


@pytest.mark.slow
def test_hidden_states_of_ranks_change_no_token(engine, whole):
    params = SAMPLED.clone(return_hidden_states="all")
    found, expected = (each.generate(PROMPTS, params, use_tqdm=False) for each in (engine, whole))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours.prompt_hidden_states, theirs.prompt_hidden_states)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids and one.logprobs.tobytes() == other.logprobs.tobytes()
            assert np.array_equal(one.hidden_states, other.hidden_states)


def test_ranks_give_the_bits_of_one_process(engine, whole):
    assert all_of(engine, "qwen3") == all_of(whole, "qwen3")
    assert num_preemptions(engine) == num_preemptions(whole) > 0


@pytest.mark.slow
def test_ranks_that_find_other_weights_choose_alike(tmp_path):
    """A projection that is zeros on one rank alone proves nothing there, so no rank compiles the layers."""
    model = tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[44:].zero_()  # rank 1's rows
    path = tiny_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    model.save_pretrained(path)
    with running(path, 2) as two, running(path, 1) as one:
        assert two.llm_engine.frontend.client.driver.executor.worker.runner.model.decoder is None
        assert results_of(two, SAMPLED) == results_of(one, SAMPLED)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_prompts_are_pooled_to_the_bits_of_one_process(engine, whole, kind):
    outputs = [llm.encode(PROMPTS, PoolingParams(kind=kind), use_tqdm=False) for llm in (engine, whole)]
    found, expected = ([each.outputs.data.tobytes() for each in some] for some in outputs)
    assert found == expected


def test_updates_in_flight_change_the_same_tokens_to_the_same_bits(engine, whole):
    assert with_updates(engine.llm_engine) == with_updates(whole.llm_engine)


def with_updates(engine, architecture="qwen3"):
    """Samples of requests that go on through updates, of each the versions of its tokens."""
    engine.update_weights(tiny_model(architecture), version=10, reset_version=True)
    ids = [engine.add_request(f"r{i}", each, SAMPLED) for i, each in enumerate(PROMPTS)]
    ended, updates = {}, {3: ("keep", 3), 7: ("recompute", 4), 12: ("keep", 5)}
    for step in range(1000):
        if step in updates:
            kv, seed = updates[step]
            report = engine.update_weights(tiny_model(architecture, seed=seed), kv=kv, staging="shadow")
            assert report.num_in_flight > 0
        ended |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            break
    samples = [sample for name in ids for sample in ended[name].outputs]
    assert max(len(sample.version_spans) for sample in samples) > 2
    return [[plain(s.token_ids), plain(s.logprobs), repr(s.version_spans)] for s in samples]


@pytest.mark.slow
@pytest.mark.parametrize("architecture, num_ranks, options", [
    ("mixtral", 2, dict(dtype="bfloat16")),
    ("llama", 2, dict(dtype="bfloat16", async_scheduling=True)),
    ("qwen2", 4, {}),
    ("qwen3_moe", 4, {}),
    ("mixtral", 4, {}),
    ("mixtral", 4, dict(dtype="bfloat16")),
    ("qwen3", 4, dict(dtype="bfloat16")),
])  # fmt: skip
def test_more_models_and_ranks_give_the_bits_of_one_process(tmp_path, architecture, num_ranks, options):
    path = tiny_checkpoint(tmp_path, architecture)
    with running(path, 1, **options) as whole, running(path, num_ranks, **options) as cut:
        assert all_of(cut, architecture) == all_of(whole, architecture)
        assert num_preemptions(cut) == num_preemptions(whole) > 0
        assert with_updates(cut.llm_engine, architecture) == with_updates(whole.llm_engine, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_key_head_is_held_by_every_rank(tmp_path, num_ranks):
    path = tiny_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
    with running(path, 1) as whole, running(path, num_ranks) as cut:
        assert all_of(cut, "qwen3", num_key_value_heads=1) == all_of(whole, "qwen3", num_key_value_heads=1)
        assert num_preemptions(cut) == num_preemptions(whole) > 0
        usages = [each.collective_rpc("get_memory_usage") for each in (cut, whole)]
    assert [len(ranks) for ranks in usages] == [num_ranks, 1]
    assert {rank["kv_cache"] for ranks in usages for rank in ranks} == {usages[1][0]["kv_cache"]} != {0}


@pytest.mark.slow
def test_ranks_without_a_token_for_their_experts_go_along(tmp_path):
    """A step of one token needs two of eight experts: two of four ranks have nothing to compute."""
    path, num_threads = tiny_checkpoint(tmp_path, "mixtral"), torch.get_num_threads()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    with running(path, 1) as whole, running(path, 4) as cut:
        experts = cut.collective_rpc("get_weight_rows", args=["model.layers.0.mlp.experts.down_proj"])
        assert [len(part) for part in experts] == [2, 2, 2, 2]
        results = [each.generate(PROMPTS[-1:], params, use_tqdm=False)[0].outputs[0] for each in (cut, whole)]
    found, expected = ([list(each.token_ids), plain(each.logprobs)] for each in results)
    assert found == expected and len(found[0]) == 12
    assert torch.get_num_threads() == num_threads


def test_each_rank_holds_its_part_of_weights_and_of_the_pool(engine, whole):
    engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    ranks = engine.collective_rpc("get_memory_usage")
    assert len(ranks) == 2
    whole.generate(PROMPTS, SAMPLED, use_tqdm=False)
    (one,) = whole.collective_rpc("get_memory_usage")
    for rank in ranks:
        assert 0 < rank["kv_cache"] <= 0.6 * one["kv_cache"]
        assert 0 < rank["weights"] <= 0.8 * one["weights"], "whole pages, of few panels"


def test_every_rank_answers_calls_with_its_own_rows(engine, checkpoint):
    name = "model.layers.0.mlp.down_proj.weight"
    rows = engine.collective_rpc("get_weight_rows", kwargs={"name": name, "count": 1000})
    assert [len(part) for part in rows] == [32, 32]
    with pytest.raises(RPCError, match="unknown|Unknown"):
        engine.collective_rpc("no_such_method")
    with pytest.raises(RPCError, match="not among the module's weights"):
        engine.collective_rpc("get_weight_rows", kwargs={"name": "nothing"})
    assert engine.collective_rpc("get_weight_digest")[0] == engine.collective_rpc("get_weight_digest")[1]


def test_an_update_that_is_refused_changes_no_rank(engine):
    before = engine.collective_rpc("get_weight_digest")[0]
    broken = tiny_model("qwen3", seed=9)
    broken.lm_head.weight.data[3, 5] = float("nan")
    with pytest.raises(RolloutEngineError, match=r"lm_head.weight.*NaN"):
        engine.update_weights(broken)
    assert engine.collective_rpc("get_weight_digest")[0] == before


def test_a_step_that_rank_0_cannot_prepare_ends_its_requests_alone(engine, monkeypatch):
    before, core = results_of(engine, SAMPLED), engine.llm_engine
    runner = core.frontend.client.driver.executor.worker.runner
    make, steps = runner._flat_batch, []

    def fail_at_third(*args):
        steps.append(args)
        if len(steps) == 3:
            raise MemoryError("injected")
        return make(*args)

    monkeypatch.setattr(runner, "_flat_batch", fail_at_third)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(str(i), prompt, SAMPLED)
    reasons = set()
    while core.has_unfinished_requests():
        reasons |= {sample.finish_reason for output in core.step() if output.finished for sample in output.outputs}
    assert "error" in reasons and results_of(engine, SAMPLED) == before


def test_a_rank_that_cannot_prepare_an_update_leaves_all_ranks_as_they_were(engine):
    before = results_of(engine, SAMPLED), engine.collective_rpc("get_weight_digest")[0]
    for method in ("start", "place", "pack"):
        engine.collective_rpc("break_weights", args=[1, method])
        with pytest.raises(RPCError, match="rank 1: MemoryError: injected") as caught:
            engine.update_weights(tiny_model("qwen3", seed=9))
        assert caught.value.rank == 1 and "raise MemoryError" in caught.value.traceback
        assert before == (results_of(engine, SAMPLED), engine.collective_rpc("get_weight_digest")[0])
    assert engine.collective_rpc("num_weights_elsewhere")[1] > 0
    engine.check_health()


@pytest.mark.quick(1)
@pytest.mark.parametrize("method, staging", [("commit", "shadow"), ("pack", "inplace")])
def test_a_rank_that_fails_half_way_makes_all_ranks_ask_for_a_whole_update(engine, method, staging):
    engine.update_weights(tiny_model("qwen3", seed=8))
    before = results_of(engine, SAMPLED)
    engine.collective_rpc("break_weights", args=[1, method])
    with pytest.raises(DirtyWeightsError, match="rank 1: MemoryError: injected.* Live weights .* mixture"):
        engine.update_weights(tiny_model("qwen3", seed=9), staging=staging)
    with pytest.raises(DirtyWeightsError, match="num_weights_elsewhere|live_weights"):
        engine.collective_rpc("num_weights_elsewhere")
    with pytest.raises(RolloutEngineError, match="weights are incomplete"):
        engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    engine.update_weights(tiny_model("qwen3", seed=8))
    assert results_of(engine, SAMPLED) == before


def test_updates_digests_and_saves_make_no_weight_whole(engine, monkeypatch, tmp_path):
    def refuse(self, name):
        raise AssertionError(f"{name} is made whole")

    monkeypatch.setattr(TeamWeights, "values", refuse)
    monkeypatch.setattr(part_weights, "WINDOW_BYTES", 4096)  # less than most weights have
    model = tiny_model("qwen3", seed=6)
    report = engine.update_weights(model)
    assert report.digest == total_digest(describe_all(model.state_dict().items()))
    assert engine.collective_rpc("get_weight_digest") == [report.digest] * 2
    engine.save_sharded_state(tmp_path / "state")
    assert load_file(tmp_path / "state" / "rank-0-of-2.safetensors").keys() == model.state_dict().keys()


class AllocatedBytes(TorchDispatchMode):
    """Counts tensors that are made inside: `peak` is the most bytes of them that were there at once."""

    def __init__(self):
        super().__init__()
        self._made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self._made |= {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in storages if s._cdata not in given}
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._made.values()))
        return out


def test_whole_values_are_made_one_tensor_at_a_time(engine, monkeypatch):
    monkeypatch.setattr(part_weights, "WINDOW_BYTES", 4096)
    model = tiny_model("qwen3", seed=6)
    engine.update_weights(model)
    weights = engine.llm_engine.frontend.client.driver.executor.updater.weights
    with AllocatedBytes() as allocated:
        for name, tensor in model.state_dict().items():
            value = weights.values(name)
            assert value.numpy().tobytes() == tensor.numpy().tobytes(), name
            del value
    assert isinstance(weights, TeamWeights)
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    assert largest <= allocated.peak < 2 * largest, "a whole one, and the rows of rank 0"


def test_products_that_depend_on_the_batch_are_refused_by_name():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 and deterministic=False"):
        EngineConfig(model="m", tensor_parallel_size=2, deterministic=False)


def test_what_ranks_cannot_do_is_refused_by_name(engine):
    with pytest.raises(LifecycleError, match="apply_model: not possible with tensor_parallel_size=2"):
        engine.apply_model(lambda module: None)


def ranks_below():
    """The living processes of ranks that are children of this one; `process_iter` tells nothing of ended ones."""
    own = psutil.Process().pid
    children = [child for child in psutil.process_iter(["ppid", "cmdline"]) if child.info["ppid"] == own]
    return [child for child in children if _RANK_MODULE in (child.info["cmdline"] or ())]


def test_a_rank_that_dies_ends_the_engine_by_its_name(engine):
    (rank,) = ranks_below()
    rank.kill()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {rank.pid}\) has ended with status -9"):
        while True:
            engine.generate(PROMPTS, SAMPLED, use_tqdm=False)
    assert time.monotonic() - start < 5
    engine.shutdown()
    assert not ranks_below()
