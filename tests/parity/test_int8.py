"""Layers with weights rounded to int8: the bits of a row do not depend on its batch, and everything says what it is."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, ConfigError, EngineConfig, RolloutPolicy, SamplingParams, exact, read_jsonl, replay
from rollout_engine.base.provenance import rollout_note
from rollout_engine.kernels.cpu import gemm
from rollout_engine.serve.openai.shapes import of_versions
from rollout_engine.testing import random_adapter
from rollout_engine.testing.architectures import SIZES

DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = ["a", "some words", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("own_products")


def engine_for(kind, directory, dtype=torch.float32, **options):
    defaults = {"quantization": "int8", "num_kv_blocks": 256, "max_model_len": 256, "log_stats": False}
    make = kind if kind is LLM else kind.from_pretrained
    return make(str(directory), dtype=str(dtype).removeprefix("torch."), **defaults | options)


def policy_for(directory, dtype=torch.float32, **options):
    return engine_for(RolloutPolicy, directory, dtype, **options)


def rollout(policy, prompts=PROMPTS, **options):
    return policy.rollout(prompts, PARAMS, use_tqdm=False, **({"num_samples": 3, "seed": 1} | options))


def rounded(model):
    """The model with the weights of its layers rounded as the option says, by numpy."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ".layers." in name:
            values = parameter.detach().float().numpy()
            scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
            parameter.data = torch.from_numpy(np.rint(values / scales) * scales).to(parameter.dtype)
    return model


def moved(model, scale=0.02):
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_((noise * scale).to(parameter.dtype))
    return model


def model_of(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def logprobs_of(model, batch):
    with torch.no_grad():
        return exact.token_logprobs(model, batch["tokens", "full"], batch["masks", "all_attention_mask"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])  # the last runs as modules
def test_tokens_and_bits_are_the_same_in_any_batch_and_by_score(checkpoint, architecture, dtype):
    params = [PARAMS.clone(seed=i, n=3, logprobs=0) for i in range(len(PROMPTS))]
    with engine_for(LLM, checkpoint(architecture, dtype, **SIZES[architecture]), dtype) as llm:
        choices = llm.frontend.client.info.choices
        assert "layers in int8, " in choices
        assert f"decoder {'modules' if architecture == 'gemma2' else 'compiled'}" in choices  # its trial compares bits
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, its_params, output in zip(PROMPTS, params, together, strict=True):
            [alone] = llm.generate([prompt], its_params, use_tqdm=False)
            scores = llm.score([output.prompt_token_ids] * 3, [sample.token_ids for sample in output.outputs])
            for sample, same, scored in zip(output.outputs, alone.outputs, scores, strict=True):
                assert sample.token_ids == same.token_ids and sample.quantization == "int8"
                assert of_versions(sample, 0)["quantization"] == "int8"
                assert np.array_equal(sample.logprobs, same.logprobs) and np.array_equal(sample.logprobs, scored)


def test_it_is_the_model_with_rounded_layers(checkpoint):
    directory = checkpoint("qwen3", **SIZES["qwen3"])
    plain = exact.enable(model_of(directory))
    reference = exact.enable(rounded(model_of(directory)))
    with policy_for(directory) as policy:
        batch = rollout(policy)
    place = batch["masks", "all_assistant_mask"][:, 1:]
    ours, close, far = batch["log_probs", "full"][:, 1:], logprobs_of(reference, batch), logprobs_of(plain, batch)
    assert (ours - close)[place].abs().max() < 1e-4 < 10 * 1e-4 < (ours - far)[place].abs().max()


def test_rollouts_and_scores_say_it_and_those_of_other_engines_do_not(checkpoint):
    directory = checkpoint("llama")
    for quantization in ("int8", None):
        with policy_for(directory, quantization=quantization) as policy:
            batch = rollout(policy)
            for noted in (batch["tokens", "full"], policy.score(batch)):
                assert rollout_note(noted).quantization == quantization


def test_the_exact_trainer_names_it_at_once(checkpoint, caplog):
    directory = checkpoint("llama")
    with policy_for(directory) as policy:
        assert "close to the trainer's and not equal" in caplog.text
        batch = rollout(policy)
    trainer = exact.enable(model_of(directory))
    caplog.clear()
    logprobs = logprobs_of(trainer, batch)
    assert "rounds the weights of layers (quantization='int8')" in caplog.text
    report = exact.check(batch, logprobs)
    assert not report.is_exact and "leave quantization out" in report.cause


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
def test_new_weights_are_rounded_anew_and_digests_are_of_those_given(checkpoint, tmp_path, dtype, inplace):
    directory = checkpoint("qwen3", dtype, **SIZES["qwen3"])
    model = moved(model_of(directory, dtype))
    model.save_pretrained(tmp_path / "moved")
    with policy_for(tmp_path / "moved", dtype, tokenizer=str(directory)) as fresh:
        wanted, expected = rollout(fresh), fresh.collective_rpc("get_weight_digest")
    with policy_for(directory, dtype) as policy:
        before = rollout(policy)
        report = policy.update_weights(model, staging="inplace" if inplace else "shadow")
        assert policy.collective_rpc("get_weight_digest") == expected == [report.digest]
        for _ in range(2):
            batch = rollout(policy)
            assert torch.equal(batch["tokens", "full"], wanted["tokens", "full"])
            assert torch.equal(batch["log_probs", "full"], wanted["log_probs", "full"])
            assert not torch.equal(batch["log_probs", "full"], before["log_probs", "full"])
            policy.sleep(level=1)
            policy.wake_up()


def test_a_refused_update_leaves_the_rounded_weights_as_they_were(checkpoint):
    directory = checkpoint("llama")
    with policy_for(directory) as policy:
        before = rollout(policy)
        bad = moved(model_of(directory))
        with torch.no_grad():
            bad.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
        with pytest.raises(Exception, match="down_proj"):
            policy.update_weights(bad)
        assert torch.equal(rollout(policy)["log_probs", "full"], before["log_probs", "full"])
        one = {"model.layers.0.mlp.up_proj.weight": moved(model_of(directory)).model.layers[0].mlp.up_proj.weight}
        policy.update_weights(one, partial=True)
        assert not torch.equal(rollout(policy)["log_probs", "full"], before["log_probs", "full"])


def test_an_adapter_is_added_to_rounded_layers_in_any_batch(checkpoint):
    directory = checkpoint("llama")
    with policy_for(directory) as policy:
        policy.add_lora(random_adapter(model_of(directory), "one"))
        plain, adapted = rollout(policy), rollout(policy, lora_request="one")
        assert not torch.equal(plain["log_probs", "full"], adapted["log_probs", "full"])
        assert torch.equal(policy.score(adapted, lora="one"), adapted["log_probs", "full"])


def test_drafted_tokens_change_no_bit(checkpoint):
    directory = checkpoint("llama")
    with policy_for(directory) as plain, policy_for(directory, speculation="auto") as drafting:
        expected = rollout(plain)
        for _ in range(2):
            assert torch.equal(rollout(drafting)["log_probs", "full"], expected["log_probs", "full"])


def test_a_rollout_is_made_again_by_the_same_option_and_without_it_the_cause_is_named(checkpoint, tmp_path):
    directory, log = checkpoint("llama"), tmp_path / "rollouts.jsonl"
    with policy_for(directory) as policy:
        rollout(policy, log_to=log)
        samples = read_jsonl(log)
        assert all(report.is_equal for report in replay(policy, samples))
    assert samples[0]["engine"]["quantization"] == "int8"
    with policy_for(directory, quantization=None) as other:
        reports = replay(other, samples)
    assert not any(report.is_equal for report in reports)
    assert "another quantization: it was 'int8', and is None" in reports[0].causes


@pytest.mark.parametrize("other", [dict(device="cuda"), dict(deterministic=False), dict(tensor_parallel_size=2)])
def test_options_that_exclude_it_are_named(other):
    with pytest.raises(ConfigError, match=f"quantization='int8' and {next(iter(other))}=.* are both set"):
        EngineConfig(model="some", quantization="int8", **other)


def test_unknown_roundings_are_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="quantization='int4' is not allowed.*'int8'"):
        EngineConfig(model="some", quantization="int4")
    with pytest.raises(ConfigError, match="'load_in_8bit'.*quantization='int8'"):
        EngineConfig(model="some", load_in_8bit=True)


@pytest.mark.parametrize(
    ("architecture", "reason"), [("qwen3_moe", "mixture of experts"), ("gpt2", "parts whose rows may depend")]
)
def test_models_whose_layers_are_not_rounded_are_refused(checkpoint, architecture, reason):
    with pytest.raises(ConfigError, match=f"quantization='int8' is not possible: .*{reason}"):
        LLM(str(checkpoint(architecture, **SIZES[architecture])), quantization="int8", num_kv_blocks=64)


def test_machines_without_the_kernels_refuse_it(checkpoint, monkeypatch):
    monkeypatch.setattr(gemm, "supports", lambda dtype: False)
    with pytest.raises(ConfigError, match="quantization='int8' needs the C\\+\\+ kernels.*Install g\\+\\+"):
        LLM(str(checkpoint("llama")), quantization="int8", num_kv_blocks=64)
