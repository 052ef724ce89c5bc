"""Pooled prompts equal the hidden states and logits of transformers, and themselves bit for bit in any batch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rollout_engine import LLM, ConfigError, PoolingParams, RequestError, SamplingParams
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.architectures import SIZES

PROMPTS = [[*range(5, 5 + length)] for length in (3, 40, 150, 7)]
PADDED = [[5, 6, 0, 0], [5, 0, 6], [0, 0]]
MODELS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
KINDS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "token": lambda states: states,
}


def encode(llm, prompts, **params):
    return [output.outputs.data for output in llm.encode(prompts, PoolingParams(**params), use_tqdm=False)]


def bits(arrays):
    return [(array.shape, array.tobytes()) for array in arrays]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("reward"), head="sequence", num_labels=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_transformers(checkpoint, kind):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with LLM(checkpoint, max_num_batched_tokens=64, log_stats=False) as llm:
        found, scaled = encode(llm, PROMPTS, kind=kind), encode(llm, PROMPTS, kind=kind, normalize=True)
    for prompt, one, other in zip(PROMPTS, found, scaled, strict=True):
        with torch.no_grad():
            expected = KINDS[kind](theirs.model(torch.tensor([prompt])).last_hidden_state[0])
        np.testing.assert_allclose(one, expected, atol=1e-5)
        np.testing.assert_allclose(other, torch.nn.functional.normalize(expected, dim=-1), atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("head", MODELS)
def test_a_head_computes_what_it_does_in_transformers(tmp_path, architecture, head):
    path = tiny_checkpoint(tmp_path, architecture, head=head, num_labels=3, **SIZES.get(architecture, {}))
    theirs = MODELS[head].from_pretrained(path).eval()
    with LLM(path, max_num_batched_tokens=64, log_stats=False) as llm:
        found = encode(llm, PROMPTS + PADDED, kind="classify")
    for prompt, logits in zip(PROMPTS + PADDED, found, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0].numpy()
        assert logits.shape == expected.shape
        np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["last", "mean", "token", "reward"])
def test_a_prompt_has_the_same_bits_in_any_batch_and_over_any_chunks(reward_model, dtype, kind):
    options = dict(dtype=dtype, log_stats=False, num_kv_blocks=256)
    with LLM(reward_model, **options) as llm:
        together = bits(encode(llm, PROMPTS, kind=kind))
        assert [bits(encode(llm, [prompt], kind=kind))[0] for prompt in PROMPTS] == together
    with LLM(reward_model, max_num_batched_tokens=7, enable_prefix_caching=False, **options) as llm:
        assert bits(encode(llm, PROMPTS, kind=kind)) == together


def test_rewards_of_steps_are_those_of_the_prompts_that_end_there(reward_model):
    prompt = [5, 6, 99, 7, 8, 98, 9, 99]
    with LLM(reward_model, log_stats=False) as llm:
        (steps,) = (output.outputs.data for output in llm.reward([prompt], step_token_ids=[99, 98], use_tqdm=False))
        alone = [llm.reward([prompt[:end]], use_tqdm=False)[0].outputs.data[0] for end in (3, 6, 8)]
    assert steps.tolist() == alone


def test_pooling_beside_samples_changes_neither(checkpoint):
    params = SamplingParams(seed=3, max_tokens=20, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(checkpoint, max_num_batched_tokens=24, log_stats=False) as llm:
        engine = llm.llm_engine
        alone = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
        pooled = bits(encode(llm, PROMPTS, kind="mean"))
        llm.reset_prefix_cache()
        engine.add_request("samples", PROMPTS[1], params)
        ids = engine.add_requests(PROMPTS, PoolingParams(kind="mean"))
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["samples"].outputs[0].token_ids == alone.outputs[0].token_ids
    assert np.array_equal(outputs["samples"].prompt_logprobs, alone.prompt_logprobs, equal_nan=True)
    assert bits(outputs[name].pooled.data for name in ids) == pooled


def test_new_weights_of_a_head_are_taken_by_their_names(reward_model):
    with LLM(reward_model, log_stats=False) as llm:
        before = encode(llm, PROMPTS, kind="reward")
        weights = AutoModelForSequenceClassification.from_pretrained(reward_model).state_dict()
        llm.update_weights(weights | {"score.weight": 2 * weights["score.weight"]})
        after = llm.reward(PROMPTS, use_tqdm=False)
    assert [output.outputs.policy_version for output in after] == [1] * len(PROMPTS)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(2 * one, other.outputs.data)


def test_a_classifier_says_that_it_cannot_generate_or_score(reward_model):
    with LLM(reward_model, log_stats=False) as llm:
        for call in (lambda: llm.generate([[5]], use_tqdm=False), lambda: llm.score([[5]], [[6]])):
            with pytest.raises(RequestError, match=r"no output head \(lm_head\), only one that classifies"):
                call()


def test_encoders_and_heads_of_another_form_are_refused(tmp_path, reward_model):
    bert = dict(hidden_size=48, num_attention_heads=3, intermediate_size=88)
    path = tiny_checkpoint(tmp_path / "bert", "bert", head="sequence", num_labels=2, **bert)
    with pytest.raises(ConfigError, match="BertForSequenceClassification .* its attention is bidirectional"):
        LLM(path)
    with pytest.raises(ConfigError, match="fp32_head=True is not possible"):
        LLM(reward_model, fp32_head=True)
