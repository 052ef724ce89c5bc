"""Updates from GGUF files and quantised checkpoints: the weights and samples of a fresh load, or a refusal."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import sync
from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.kernels.cpu import turns
from rollout_engine.serve.app import App
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import SIZES
from sync.own_files import CACHE_VARIABLE
from tests.caches import cache_without
from tests.gguf_files import metadata_of, quantised, tensors_of, write_gguf
from tests.quantised_files import quantise_checkpoint, quantise_experts
from tests.unit.serve.conftest import Client

pytest.importorskip("gguf")

QUANTISED = ["fp8-blocks", "awq", "gptq4-v2-desc-act", "pack4-group-asymmetric", "float8-channel"]
SOURCES = ["gguf", "folder", "mixture.gguf", "mxfp4", *QUANTISED]
ARCHITECTURES = {"mixture.gguf": "qwen3_moe", "mxfp4": "gpt_oss"}
FIELDS = {
    "qwen3": {},
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    "gpt_oss": SIZES["gpt_oss"] | dict(hidden_size=64, intermediate_size=32),
}
OPTIONS = dict(num_kv_blocks=64, log_stats=False, skip_tokenizer_init=True)
PROMPTS = [{"prompt_token_ids": [5, 9, 2, 7, 1, 8, 3]}, {"prompt_token_ids": [7, 8]}]
PARAMS = SamplingParams(max_tokens=8, n=2, logprobs=0, seed=5, ignore_eos=True, detokenize=False)


def architecture_of(source):
    return ARCHITECTURES.get(source, "qwen3")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache_without("gguf", tmp_path_factory.mktemp("cache") / "own")))
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Checkpoints that engines start with, by architecture."""
    folder = tmp_path_factory.mktemp("served")
    return {name: tiny_checkpoint(folder / name, name, **fields) for name, fields in FIELDS.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Paths of the weights of an update, by format."""
    folder = tmp_path_factory.mktemp("sources")
    found = {"gguf": folder / "new.gguf", "folder": folder / "folder", "mixture.gguf": folder / "mixture.gguf"}
    (folder / "folder").mkdir()
    for name, kind, seed in (("gguf", "Q8_0", 1), ("folder/m.gguf", "Q4_1", 2), ("mixture.gguf", "Q8_0", 3)):
        architecture = architecture_of(name)
        model = tiny_model(architecture, seed=seed, **FIELDS[architecture])
        tensors = quantised(tensors_of(model), kind)
        write_gguf(found.get(name, folder / name), metadata_of(model.config), tensors)
    for name in (*QUANTISED, "mxfp4"):
        architecture = architecture_of(name)
        plain = tiny_checkpoint(folder / f"plain-{name}", architecture, seed=4, **FIELDS[architecture])
        found[name] = folder / name
        if name == "mxfp4":
            quantise_experts(plain, found[name])
        else:
            quantise_checkpoint(plain, found[name], name)
    return found


def found_of(engine, **options):
    """Samples to the bit, and the digest of all weights."""
    results = engine.generate(PROMPTS, PARAMS, use_tqdm=False, **options)
    samples = [(list(each.token_ids), each.logprobs.tobytes()) for result in results for each in result.outputs]
    return samples, engine.collective_rpc("get_weight_digest")[0]


@pytest.fixture(scope="module")
def fresh(sources):
    """fresh(source, dtype) -> what an engine has that loaded the source."""
    known = {}

    def find(name, dtype):
        if (name, dtype) not in known:
            with LLM(sources[name], dtype=dtype, **OPTIONS) as engine:
                known[name, dtype] = found_of(engine)
        return known[name, dtype]

    return find


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", FIELDS)
def test_an_update_gives_the_weights_and_samples_of_a_fresh_load(served, sources, fresh, architecture, dtype):
    with LLM(served[architecture], dtype=dtype, **OPTIONS) as engine:
        before = found_of(engine)
        names = [name for name in SOURCES if architecture_of(name) == architecture]
        for staging in ("shadow", "inplace"):
            for name in names:
                report = engine.update_weights(sources[name], staging=staging)
                assert found_of(engine) == fresh(name, dtype) != before, name
                assert report.num_bytes_sent > 0
        whole = engine.update_weights(str(sources[names[0]]), partial=True)  # all of them may be a part too
        assert found_of(engine) == fresh(names[0], dtype) and whole.digest == fresh(names[0], dtype)[1]


@pytest.mark.slow
@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
def test_ranks_take_their_parts_of_every_format(served, sources, fresh):
    for architecture, num_ranks in (("qwen3", 2), ("qwen3_moe", 2)):
        options = dict(dtype="bfloat16", tensor_parallel_size=num_ranks, **OPTIONS)
        with LLM(served[architecture], **options) as engine:
            for name in SOURCES:
                if architecture_of(name) == architecture:
                    engine.update_weights(sources[name])
                    assert found_of(engine) == fresh(name, "bfloat16"), name


def test_a_core_in_its_own_process_reads_the_path_itself(served, sources, fresh):
    async def run(engine):
        for name in ("gguf", "folder", "fp8-blocks", "awq"):
            report = await engine.update_weights(sources[name])
            assert report.digest == fresh(name, "bfloat16")[1], name

    with AsyncLLM(served["qwen3"], dtype="bfloat16", **OPTIONS) as engine:
        asyncio.run(run(engine))


@pytest.mark.slow
def test_both_replicas_of_a_fleet_have_the_weights_of_a_fresh_load(served, sources, fresh):
    async def run(fleet):
        for name in ("gguf", "gptq4-v2-desc-act"):
            await fleet.update_weights(sources[name])
            assert await fleet.collective_rpc("get_weight_digest") == [fresh(name, "bfloat16")[1]] * 2
            with pytest.raises(WeightUpdateError, match="first send all weights once"):
                await fleet.update_weights(sources[name], partial=True)
        with pytest.raises(WeightUpdateError, match="describes another model"):
            await fleet.update_weights(sources["mixture.gguf"])
        assert await fleet.collective_rpc("get_weight_digest") == [fresh(name, "bfloat16")[1]] * 2

    with AsyncLLM(served["qwen3"], dtype="bfloat16", num_replicas=2, num_threads=1, **OPTIONS) as engine:
        asyncio.run(run(engine))


def test_an_update_over_http_and_the_trainer_of_the_same_file_agree_to_the_bit(served, sources):
    with RolloutPolicy.from_pretrained(served["qwen3"], dtype="bfloat16", max_model_len=64) as policy:
        client = Client(App(policy))
        for name, body in (("gguf", {"load_format": "gguf"}), ("awq", {})):
            answer = client.post("/update_weights_from_disk", {"model_path": str(sources[name]), **body})
            assert answer["success"] and answer["weight_version"] == policy.policy_version
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            batch = policy.rollout(["hello"], params, num_samples=1, seed=1, use_tqdm=False)
            trainer = exact.load(sources[name], torch.bfloat16)
            report = exact.check(batch, exact.token_logprobs(trainer, batch))
            assert report.is_exact and report.num_tokens == 8, report
            rows = client.send("GET", "/get_weights_by_name?name=model.layers.1.mlp.up_proj.weight").json()
            assert torch.equal(torch.tensor(rows), trainer.model.layers[1].mlp.up_proj.weight.float()[: len(rows)])
        version = policy.policy_version
        answer = client.post("/fetch_weights", {"uri": f"file://{sources['folder']}"})
        assert answer["weight_version"] == version + 1
        problem = client.problem("/get_weights_by_name?name=blk.0.attn_q.weight", method="GET")
        assert "blk.0.attn_q.weight" in problem["message"]
        problem = client.problem("/update_weights_from_disk", {"model_path": str(sources["mixture.gguf"])})
        assert "describes another model than the one that is served" in problem["message"]


@pytest.mark.parametrize("name", ["gguf", "fp8-blocks"])
def test_a_load_is_saved_in_parts_asked_for_by_name_and_adapted_as_any_other(sources, fresh, tmp_path, name):
    adapter = random_adapter(tiny_model("qwen3"), "a", seed=1)
    with LLM(sources[name], dtype="bfloat16", **OPTIONS) as engine:
        assert found_of(engine) == fresh(name, "bfloat16")
        engine.add_lora(adapter)
        adapted = found_of(engine, lora_request="a")
        assert adapted[0] != fresh(name, "bfloat16")[0]
        engine.save_sharded_state(tmp_path / "state")
        [rows] = engine.collective_rpc("get_weight_rows", args=("model.layers.1.mlp.up_proj.weight", 9))
    with LLM(tmp_path / "state", load_format="sharded", **OPTIONS) as engine:
        assert found_of(engine) == fresh(name, "bfloat16")
        engine.add_lora(adapter)
        assert found_of(engine, lora_request="a") == adapted
    trainer = exact.load(sources[name], torch.bfloat16)
    assert torch.equal(torch.tensor(rows), trainer.model.layers[1].mlp.up_proj.weight.float()[:9])


def test_a_part_of_a_quantised_checkpoint_leaves_the_other_weights_as_they_are(served, sources, tmp_path):
    part = shutil.copytree(sources["awq"], tmp_path / "part")
    stored = load_file(part / "model.safetensors")
    save_file({n: t for n, t in stored.items() if "layers.1.mlp.up" in n}, part / "model.safetensors")
    weights = dict(tiny_model("qwen3").state_dict())
    weights |= {n: t for n, t in exact.load(sources["awq"]).state_dict().items() if "layers.1.mlp.up" in n}
    with LLM(served["qwen3"], **OPTIONS) as engine:
        with pytest.raises(WeightUpdateError, match="partial=True"):
            engine.update_weights(part)
        found = engine.update_weights(part, partial=True).digest
        assert found == engine.update_weights(weights).digest == engine.collective_rpc("get_weight_digest")[0]


def other_rope(model):
    model.config.rope_parameters["rope_theta"] = 500.0


def other_epsilon(model):
    model.config.rms_norm_eps = 1e-3


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", [other_rope, other_epsilon])
@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_files_of_a_model_that_computes_something_else_are_refused(served, tmp_path, change, kind):
    model = tiny_model("qwen3", seed=1)
    change(model)
    path = tmp_path / "new.gguf"
    if kind == "gguf":
        write_gguf(path, metadata_of(model.config), tensors_of(model))
    else:
        path = tmp_path / "new"
        model.save_pretrained(path)
    with LLM(served["qwen3"], **OPTIONS) as engine:
        before = found_of(engine)
        named = "rope_parameters=" if change is other_rope else "rms_norm_eps="
        with pytest.raises(WeightUpdateError, match=rf"describes another model .* 1 field differs \({named}.*, here "):
            engine.update_weights(path)
        assert found_of(engine) == before and engine.policy_version == 0


def test_fields_that_change_no_log_prob_may_differ(served, tmp_path):
    tiny_model("qwen3", seed=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    changes = dict(attention_dropout=0.1, max_position_embeddings=64, use_cache=False, eos_token_id=7, unknown=3)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with LLM(served["qwen3"], **OPTIONS) as engine:
        expected = engine.update_weights(tiny_model("qwen3", seed=1)).digest
        assert engine.update_weights(tmp_path).digest == expected


def test_files_that_a_load_refuses_are_refused_and_change_nothing(served, sources, tmp_path):
    whole = sources["gguf"].read_bytes()
    cut, two, headless = tmp_path / "cut.gguf", tmp_path / "two", tmp_path / "headless.gguf"
    cut.write_bytes(whole[:-4000])
    two.mkdir()
    for name in ("a", "b"):
        (two / f"{name}.gguf").write_bytes(whole)
    model = tiny_model("qwen3", tie_word_embeddings=True)
    write_gguf(headless, metadata_of(model.config), tensors_of(model))
    (tmp_path / "text.gguf").write_text("no weights")
    with LLM(served["qwen3"], **OPTIONS) as engine:
        before = found_of(engine)
        for path, message in (
            (cut, r"cut\.gguf is not a whole GGUF file"),
            (two, "has 2 GGUF files"),
            (headless, r"1 tensor is missing: lm_head\.weight"),
            (tmp_path / "text.gguf", r"text\.gguf is not a whole GGUF file"),
            (tmp_path / "none.gguf", "does not exist"),
        ):
            with pytest.raises(WeightUpdateError, match=message):
                engine.update_weights(path)
            assert found_of(engine) == before and engine.policy_version == 0
    with pytest.raises(sync.SyncError, match="Engines read GGUF files"):
        sync.publish(tmp_path / "store", sources["gguf"], 1)
