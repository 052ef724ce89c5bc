"""A model cut over ranks with devices says what one device says, to the bit where products are deterministic.

The devices are the host's memory through Triton's interpreter, connected by gloo.
"""

import os
import random
import signal
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import LLM, ConfigError, EngineDeadError, SamplingParams
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.execution import process_executor, rank_launcher, worker
from rollout_engine.execution.rank_team import RankTeam
from rollout_engine.execution.rank_wire import Meet
from rollout_engine.kernels.cpu import turns
from rollout_engine.model import backends
from rollout_engine.model.cuda.backend import CudaBackend
from rollout_engine.model.sampling import logit_rows
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from tests.integration.test_remote_ranks import Elsewhere
from tests.unit.model.cuda.conftest import OPTIONS

pytestmark = [
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks' devices would be one"),
    # Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([7, 8, 9], list(range(40, 62)))]
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DRAWN = SamplingParams(temperature=0.8, top_k=20, max_tokens=3, logprobs=1, n=2, seed=3, ignore_eos=True)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A function from a number of ranks, an architecture, its fields and options to an `LLM` on as many devices."""
    made = []
    device = backends.Device(torch.device("cpu"), CudaBackend)
    for module in (process_executor, worker):
        monkeypatch.setattr(module, "device_of", lambda config: device)
    monkeypatch.setattr(rank_launcher, "MODULE", "tests.unit.model.cuda.rank_on_interpreter")

    def make(num_ranks, architecture="qwen3", fields=None, **options):
        path = tiny_checkpoint(tmp_path / architecture, architecture, **(fields or {}))
        options = OPTIONS | {"num_threads": 1, "tensor_parallel_size": num_ranks, "deterministic": True} | options
        made.append(LLM(str(path), **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def said(llm, prompts=PROMPTS, params=DRAWN):
    """Bits of all that an engine says to requests, and of scores."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [(list(c.token_ids), c.logprobs.tobytes()) for output in outputs for c in output.outputs]
    found += [np.asarray(output.prompt_logprobs).tobytes() for output in outputs]
    return found, [np.asarray(each).tobytes() for each in llm.score([[5, 9, 2], [7]], [[4, 5], [8]])]


def executor_of(llm):
    return llm.frontend.client.driver.executor


@pytest.mark.slow
def test_two_devices_say_what_one_says_before_and_after_an_update(engine):
    one, two = (engine(n, fields=SMALL, dtype="bfloat16") for n in (1, 2))
    assert executor_of(two).worker.runner.model.decoder is not None
    prompts = [{"prompt_token_ids": list(range(40, 53))}]
    assert said(two, prompts) == said(one, prompts)
    source = tiny_model("qwen3", seed=5, **SMALL)
    assert two.update_weights(source).digest == one.update_weights(source).digest
    assert said(two, prompts) == said(one, prompts)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3_moe", "bfloat16"), ("mixtral", "float32")])
def test_experts_are_divided_among_devices(engine, architecture, dtype):
    one, two = (engine(n, architecture, fields=SMALL | EXPERTS, dtype=dtype) for n in (1, 2))
    assert executor_of(two).worker.runner.model.decoder is not None
    assert said(two) == said(one)
    source = tiny_model(architecture, seed=5, **SMALL, **EXPERTS)
    assert two.update_weights(source).digest == one.update_weights(source).digest
    assert said(two) == said(one)
    asking = DRAWN.clone(return_routed_experts=True)
    outputs = [llm.generate(PROMPTS[:1], asking, use_tqdm=False)[0] for llm in (two, one)]
    (mine, other), tokens = ([sample.routed_experts for sample in o.outputs] for o in outputs), outputs[0].outputs[0]
    assert all(map(np.array_equal, mine, other))
    pair = [PROMPTS[0]["prompt_token_ids"]], [list(tokens.token_ids)]
    replayed = [llm.score(*pair, temperature=0.8, routed_experts=mine[:1])[0].tobytes() for llm in (two, one)]
    assert replayed[0] == replayed[1] == tokens.logprobs.tobytes()
    rows = [len(each) for each in two.collective_rpc("get_weight_rows", args=["model.layers.0.mlp.experts.down_proj"])]
    assert sorted(rows) == [2, 3]


@pytest.mark.slow
def test_two_devices_that_draft_say_what_one_says_without(engine):
    speculation = SpeculationConfig(max_draft_tokens=3)
    two, one = engine(2, max_num_seqs=2, speculation=speculation), engine(1, max_num_seqs=2)
    core = two.frontend.client.driver.core
    costs = core._scheduler.speculator._costs
    costs.of = costs.with_drafts = lambda num_rows: 1.0  # every draft pays
    params = msgspec.structs.replace(DRAWN, max_tokens=6)
    expected = said(one, PROMPTS, params)
    for _ in range(2):  # the second time the first has what is to be drafted
        assert said(two, PROMPTS, params) == expected
    assert sum(core.stats.drafts.num_accepted) > 0


@pytest.mark.slow
def test_a_draft_model_on_the_first_of_two_devices_changes_no_bit(engine, tmp_path):
    draft = tiny_checkpoint(tmp_path / "draft", "qwen3")
    speculation = SpeculationConfig(sources=(), draft_model=str(draft), max_draft_tokens=3)
    two, one = engine(2, max_num_seqs=4, speculation=speculation), engine(1, max_num_seqs=4)
    core = two.frontend.client.driver.core
    for costs, seconds in (core.draft_model._costs, 1.0), (core.draft_model._draft_costs, 1e-6):
        costs.of = costs.with_drafts = lambda num_rows, seconds=seconds: seconds
    costs = core._scheduler.speculator._costs
    costs.of = costs.with_drafts = lambda num_rows: 1.0
    params = msgspec.structs.replace(DRAWN, max_tokens=6)
    assert said(two, PROMPTS, params) == said(one, PROMPTS, params)
    assert sum(core.stats.drafts.num_accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_devices_say_what_one_says_under_adapters(engine, num_ranks):
    fields = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=80, intermediate_size=100)
    many, one = (engine(n, "llama", fields, max_loras=2) for n in (num_ranks, 1))
    prompts = [*PROMPTS, PROMPTS[0]]
    found = []
    for llm in (many, one):
        for name, rank in (("a", 8), ("b", 20)):
            llm.add_lora(random_adapter(tiny_model("llama", **fields), name, seed=rank, rank=rank))
        parts = [llm.list_loras()[0].digest]
        for revision in range(2):
            outputs = llm.generate(prompts, DRAWN, lora_request=["a", None, "b"], use_tqdm=False)
            parts += [(list(c.token_ids), c.logprobs.tobytes()) for output in outputs for c in output.outputs]
            parts += [each.tobytes() for each in llm.score([[5, 9, 2], [7]], [[4, 5], [8]], lora="a")]
            llm.add_lora(random_adapter(tiny_model("llama", **fields), "a", seed=3, revision=revision + 1))
        found.append(parts)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_four_ranks_share_key_and_value_heads(engine, tied):
    fields = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=80, intermediate_size=100)
    four, one = (engine(n, "llama", fields | {"tie_word_embeddings": tied}) for n in (4, 1))
    assert said(four) == said(one)


@pytest.mark.slow
def test_prefixes_that_sequences_share_are_sent(engine):
    prompts = [{"prompt_token_ids": [5] * 520 + [each]} for each in (6, 7)]
    options = dict(fields=SMALL, max_model_len=544, block_size=64, max_num_batched_tokens=544)
    two, one = (engine(n, **options) for n in (2, 1))
    found, attention = [], executor_of(two).worker.runner.model.attention
    attention.plan = lambda batch, plan=attention.plan: found.append(batch.prefixes) or plan(batch)
    assert said(two, prompts) == said(one, prompts)
    assert any(each is not None for each in found)


@pytest.mark.slow
def test_logits_of_many_rows_are_computed_by_all_ranks_piece_by_piece(monkeypatch, engine):
    monkeypatch.setattr(logit_rows, "_PIECE_NUMEL", 1000)
    monkeypatch.setenv("PIECE_NUMEL", "1000")
    params = msgspec.structs.replace(DRAWN, prompt_logprobs=0)
    two, one = (engine(n) for n in (2, 1))
    assert said(two, PROMPTS, params) == said(one, PROMPTS, params)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_models_and_updates_in_flight_have_the_bits_of_one_device(engine, seed):
    rng = random.Random(seed)
    heads, kv_heads, num_ranks = rng.choice([(6, 2, 2), (4, 4, 4), (4, 1, 2), (6, 3, 3), (8, 2, 4)])
    fields = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * rng.choice([8, 14, 24]))
    fields |= dict(intermediate_size=rng.choice([75, 88, 160]), vocab_size=rng.choice([259, 301]))
    fields |= dict(tie_word_embeddings=rng.random() < 0.5)
    architecture = rng.choice(["llama", "qwen2", "qwen3", "mistral"])
    options = dict(dtype=rng.choice(["float32", "bfloat16"]), max_num_batched_tokens=rng.choice([7, 16]))
    print(architecture, fields, num_ranks, options)
    found = []
    for ranks in (num_ranks, 1):
        core = engine(ranks, architecture, fields, **options).llm_engine
        params = [msgspec.structs.replace(DRAWN, max_tokens=6, seed=i, n=1 + i % 2) for i in range(3)]
        prompts = [*PROMPTS, {"prompt_token_ids": list(range(40, 58))}]
        ids = [core.add_request(str(i), *each) for i, each in enumerate(zip(prompts, params, strict=True))]
        ended, digests, step = {}, [], 0
        while core.has_unfinished_requests():
            if step in (2, 5):
                source = tiny_model(architecture, seed=step, **fields)
                how = {2: ("keep", "shadow"), 5: ("recompute", "inplace")}[step]
                digests.append(core.update_weights(source, kv=how[0], staging=how[1]).digest)
            ended |= {output.request_id: output for output in core.step() if output.finished}
            step += 1
        samples = [c for name in ids for c in ended[name].outputs]
        found.append((digests, [(list(c.token_ids), c.logprobs.tobytes(), repr(c.version_spans)) for c in samples]))
    assert found[0] == found[1]


def test_weights_are_written_in_place_only_once_all_ranks_have_launched_their_steps():
    told = []
    team = object.__new__(RankTeam)
    team.feed = None
    team._runs_ahead, team._tell, team.exchange = True, told.append, SimpleNamespace(meet=lambda: told.append("met"))
    for method in ("start_weights", "stage_weight", "pack_weights"):
        team._settle(method, inplace=False)
    assert told == []
    for method in ("start_weights", "stage_weight"):
        team._settle(method, inplace=True)
    for method in ("commit_weights", "release_kv"):
        team._settle(method)
    assert told == [Meet(), "met"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma2", "olmoe"])
def test_layers_that_run_as_modules_are_joined_too(engine, architecture):
    fields = EXPERTS if architecture == "olmoe" else None
    two, one = (engine(n, architecture, fields, deterministic="auto") for n in (2, 1))
    assert executor_of(two).worker.runner.model.decoder is None
    found, expected = (llm.generate(PROMPTS, DRAWN, use_tqdm=False) for llm in (two, one))
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert list(mine.token_ids) == list(other.token_ids)
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, "auto"])
def test_ranks_sleep_wake_and_are_saved(engine, tmp_path, deterministic):
    two = engine(2, deterministic=deterministic)
    before = said(two)
    two.save_sharded_state(str(tmp_path / "sharded"))
    two.sleep(level=1)
    two.wake_up()
    assert said(two) == before
    two.sleep(level=2)
    two.wake_up()
    two.update_weights(tiny_model("qwen3"))
    assert said(two) == before
    assert len(two.collective_rpc("get_weight_digest")) == 2
    options = OPTIONS | {"tensor_parallel_size": 2, "load_format": "sharded"}
    again = LLM(str(tmp_path / "sharded"), **options, deterministic=deterministic)
    try:
        assert said(again) == before
    finally:
        again.shutdown()
    other, saved = (
        ("auto", "by ranks that are exact") if deterministic is True else (True, "without deterministic=True")
    )
    with pytest.raises(ConfigError, match=f"was saved {saved}"):
        LLM(str(tmp_path / "sharded"), **options, deterministic=other)


@pytest.mark.slow
def test_scores_go_on_beside_requests(engine):
    """Pieces of a score, over a pool of their own, and steps take turns."""
    two, one = (engine(n) for n in (2, 1))
    sequences = [list(range(3, 60)), [4, 5, 6]]
    found = []
    for llm in (two, one):
        core = llm.llm_engine
        ids = [core.add_request(str(i), prompt, DRAWN) for i, prompt in enumerate(PROMPTS)]
        core.step()
        scores = [each.tobytes() for each in llm.score([s[:1] for s in sequences], [s[1:] for s in sequences])]
        ended = {}
        while core.has_unfinished_requests():
            ended |= {output.request_id: output for output in core.step() if output.finished}
        tokens = [(list(c.token_ids), c.logprobs.tobytes()) for i in ids for c in ended[i].outputs]
        found.append((scores, tokens))
    assert found[0] == found[1]


@pytest.mark.slow
def test_devices_of_other_machines_say_what_one_says_before_and_after_an_update(engine, monkeypatch):
    """Hosts that share no memory; the kernels and what devices exchange are as on one machine."""
    one = engine(1, fields=SMALL)
    monkeypatch.setattr(process_executor, "_launcher_of", lambda config, _: Elsewhere(config.tensor_parallel_size))
    two = engine(2, fields=SMALL)
    prompts = [{"prompt_token_ids": list(range(40, 53))}]
    assert said(two, prompts) == said(one, prompts)
    source = tiny_model("qwen3", seed=5, **SMALL)
    assert two.update_weights(source, staging="inplace").digest == one.update_weights(source).digest
    assert said(two, prompts) == said(one, prompts)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_and_is_named(engine):
    two = engine(2)
    (rank,) = executor_of(two)._team._ranks
    os.kill(rank.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {rank.process.pid}\) has ended with status -9"):
        said(two)


def test_too_few_devices_are_refused_by_number(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"needs 2 devices.*sees 1 \(CUDA_VISIBLE_DEVICES=3\)"):
        rank_launcher._check_devices(2, 1)


@pytest.mark.parametrize(("visible", "expected"), [(None, ["1", "2"]), ("4, 6,7", ["6", "7"])])
def test_each_rank_sees_one_device(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [rank_launcher._device_variables(rank)["CUDA_VISIBLE_DEVICES"] for rank in (1, 2)] == expected
