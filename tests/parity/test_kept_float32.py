"""Tensors that transformers keeps in float32 in a bfloat16 or float16 model have that dtype here, everywhere."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams, exact
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.construct import construct
from rollout_engine.testing import byte_tokenizer, tiny_config, tiny_model
from rollout_engine.testing.architectures import SIZES
from sync import publish

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERTS = dict(n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1)
ENGINE = dict(dtype="bfloat16", num_kv_blocks=64, max_model_len=128, log_stats=False)
FLINT = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=88)


def save(model, directory):
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A bfloat16 checkpoint whose router bias is float32 and close together far from zero, as real ones are."""
    model = tiny_model("deepseek_v3", seed=3, **(SIZES["deepseek_v3"] | EXPERTS)).bfloat16()
    drawn = torch.randn(16, generator=torch.Generator().manual_seed(1))
    model.get_submodule(BIAS.rpartition(".")[0]).e_score_correction_bias = 10.16 + 0.04 * drawn
    return save(model, tmp_path_factory.mktemp("biased"))


@pytest.fixture(scope="module")
def with_sinks(tmp_path_factory):
    """A bfloat16 checkpoint of an exact architecture whose attention sinks are kept in float32."""
    model = tiny_model("flint", seed=3, **FLINT, mlp_only_layers=[0, 1])
    for layer in model.model.layers:
        layer.self_attn.sinks.data = 1 + torch.randn(6, generator=torch.Generator().manual_seed(1)) / 50
    return save(model, tmp_path_factory.mktemp("flint"))


def of_transformers(directory, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def dtypes_of(model):
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in model.state_dict().items()}


def test_log_probs_are_those_of_the_float32_bias_and_not_of_a_rounded_one(biased):
    prompts = [np.random.default_rng(i).integers(3, 259, 30).tolist() for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
    with LLM(biased, **ENGINE) as llm:
        assert llm.get_model_metadata()[BIAS] == ("float32", (16,))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    theirs = of_transformers(biased)
    bias = theirs.get_buffer(BIAS)

    def mean_gap():
        gaps = []
        for output in outputs:
            ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
            with torch.no_grad():
                rows = theirs(ids).logits[0, 29:-1].float().log_softmax(-1)
            wanted = rows.gather(1, ids[0, 30:, None])[:, 0].numpy()
            gaps.append(np.abs(wanted - outputs[len(gaps)].outputs[0].logprobs).mean())
        return np.mean(gaps)

    kept = mean_gap()
    bias.copy_(bias.bfloat16().float())
    assert kept < 0.03 < mean_gap()


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("architecture", ["deepseek_v3", "flint", "gpt_oss", "llama"])
def test_modules_are_built_in_the_dtypes_of_from_pretrained(architecture, dtype, tmp_path):
    fields = SIZES.get(architecture, FLINT)
    path = save(tiny_model(architecture, **fields), tmp_path / "m")
    built = construct(tiny_config(architecture, **fields), dtype=dtype, attention=ATTENTION_NAME)
    assert dtypes_of(built) == dtypes_of(of_transformers(path, dtype))


@pytest.mark.quick(1)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_source_of_an_update_keeps_the_float32_values(biased, tmp_path, load_format):
    theirs = of_transformers(biased)
    values = theirs.get_buffer(BIAS)
    with LLM(biased, load_format=load_format, **ENGINE) as llm:
        assert {name: llm.get_model_metadata()[name][0] for name in dtypes_of(theirs)} == dtypes_of(theirs)
        publish(tmp_path / "store", theirs, 7)
        digests = set()
        for source in (theirs, of_transformers(biased, torch.float32), str(biased), tmp_path / "store"):
            llm.update_weights(source)
            digests |= set(llm.collective_rpc("get_weight_digest"))
        assert len(digests) == 1
        live = llm.apply_model(lambda module: module.get_buffer(BIAS).clone())[0]
        assert torch.equal(live, values)
        llm.save_sharded_state(tmp_path / "saved")
    with LLM(tmp_path / "saved", load_format="sharded", **ENGINE) as again:
        assert torch.equal(again.apply_model(lambda module: module.get_buffer(BIAS).clone())[0], values)


@pytest.mark.slow
def test_an_engine_in_another_process_takes_them_by_shared_memory(biased):
    import asyncio

    async def digests():
        engine = AsyncLLM(biased, **ENGINE)
        try:
            report = await engine.update_weights(of_transformers(biased))
            cast = await engine.update_weights(of_transformers(biased, torch.float32))
            return report.digest, cast.digest
        finally:
            engine.shutdown()

    one, two = asyncio.run(digests())
    assert one == two


@pytest.mark.slow
def test_an_exact_trainer_and_an_engine_of_ranks_keep_them_too(with_sinks):
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    found = []
    for ranks in (1, 2):
        with RolloutPolicy.from_pretrained(with_sinks, tensor_parallel_size=ranks, **ENGINE) as policy:
            assert policy.get_model_metadata()["model.layers.1.self_attn.sinks"][0] == "float32"
            batch = policy.rollout(["a", "some words"], params, num_samples=2, use_tqdm=False)
            digest = policy.update_weights(of_transformers(with_sinks)).digest
            found.append((digest, batch["log_probs", "full"]))
    trainer = exact.enable(of_transformers(with_sinks))
    assert trainer.model.layers[1].self_attn.sinks.dtype == torch.float32
    logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    assert exact.check(batch, logprobs).is_exact
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
