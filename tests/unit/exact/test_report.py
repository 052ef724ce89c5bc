"""`exact.check` reports how a trainer differs from the engine, and why; warnings name the cause earlier."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, exact
from rollout_engine.base.provenance import logprobs_note
from rollout_engine.testing import tiny_checkpoint, tiny_model

PROMPTS = ["2 + 2 =", "The sky is"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def policy(path):
    with RolloutPolicy.from_pretrained(path) as policy:
        yield policy


@pytest.fixture(scope="module")
def rollouts(policy):
    """Layout -> batch, of the same prompts and seed."""
    arguments = dict(num_samples=2, seed=0, use_tqdm=False)
    return {layout: policy.rollout(PROMPTS, PARAMS, layout=layout, **arguments) for layout in ("padded", "packed")}


@pytest.fixture(scope="module")
def batch(rollouts):
    return rollouts["padded"]


@pytest.fixture
def trainer(path):
    return exact.enable(AutoModelForCausalLM.from_pretrained(path))


def logprobs(model, batch, **arguments):
    with torch.no_grad():
        return exact.token_logprobs(model, batch["tokens", "full"], batch["masks", "all_attention_mask"], **arguments)


def forgotten(batch):
    """The same values without the notes on the tensors."""
    return batch.to_tensordict()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_difference_after_an_optimizer_step_is_expected_and_said_so(path, trainer, kind, how):
    optimizer = kind(trainer.parameters(), lr=1e-3, **how)

    def step(batch):
        exact.token_logprobs(trainer, batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return exact.check(batch, exact.token_logprobs(trainer, batch))

    with RolloutPolicy.from_pretrained(path, num_kv_blocks=64) as policy:
        batch = policy.rollout(PROMPTS, PARAMS, seed=0, use_tqdm=False)
        report = step(batch)
        assert not report.is_exact and "not those of version 0, which is expected here: the trainer's" in report.cause
        assert "since exact.enable, as by the optimizer steps of earlier minibatches or epochs" in str(report)
        policy.update_weights(trainer)
        old, batch = batch, policy.rollout(PROMPTS, PARAMS, seed=0, use_tqdm=False)
        assert exact.check(batch, exact.token_logprobs(trainer, batch)).is_exact
        cause = exact.check(old, exact.token_logprobs(trainer, old)).cause
        assert "weights that are not those of version 0" in cause and "expected" not in cause
        assert "since update_weights sent version 1, as by" in step(batch).cause


def test_other_weights_that_were_not_written_to_are_not_expected(trainer, batch):
    other = exact.enable(tiny_model(seed=9))
    report = exact.check(batch, logprobs(other, batch))
    assert not report.is_exact and "expected" not in report.cause


def test_equal_log_probs_are_exact_in_both_layouts(trainer, rollouts):
    padded, packed = rollouts["padded"], rollouts["packed"]
    report = exact.check(padded, logprobs(trainer, padded))
    assert report.is_exact and (report.num_tokens, report.num_different, report.cause) == (48, 0, "")
    assert str(report) == "exact: 48 tokens equal bit for bit"
    assert exact.check(packed, logprobs(trainer, packed, cu_seqlens=packed["cu_seqlens"])).is_exact


def test_a_model_that_was_not_enabled_is_named(path, batch, caplog):
    plain = AutoModelForCausalLM.from_pretrained(path)
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        values = [logprobs(plain, batch) for _ in range(2)]
    assert caplog.text.count("was not given to exact.enable") == 1
    assert "call exact.enable(model)" in exact.check(batch, values[0]).cause


def test_another_dtype_is_named(path, batch, caplog):
    trainer = exact.enable(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        values = [logprobs(trainer, batch) for _ in range(2)]
    assert caplog.text.count("computes in bfloat16, the engine sampled in float32") == 1
    assert "dtype=torch.float32" in exact.check(batch, values[0]).cause


def test_another_temperature_is_named(policy, trainer, caplog):
    warm = policy.rollout(PROMPTS, SamplingParams(max_tokens=4, temperature=0.5), use_tqdm=False)
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        values = [logprobs(trainer, warm) for _ in range(2)]
    assert caplog.text.count("of temperature 1, the rollout's of 0.5") == 1
    assert "pass temperature=0.5" in exact.check(warm, values[0]).cause
    assert exact.check(warm, logprobs(trainer, warm, temperature=0.5)).is_exact


def test_greedy_rollouts_are_of_temperature_1(policy, trainer, caplog):
    greedy = policy.rollout(PROMPTS, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert exact.check(greedy, logprobs(trainer, greedy, temperature=0)).is_exact and not caplog.records


def test_log_probs_of_edited_logits_are_named(policy, trainer):
    params = SamplingParams(max_tokens=4, top_k=5, logprobs_mode="processed")
    batch = policy.rollout(PROMPTS, params, use_tqdm=False)
    cause = exact.check(batch, logprobs(trainer, batch)).cause
    assert "logprobs_mode='processed'" in cause and "weights" not in cause


def test_packed_rows_read_as_one_sequence_are_refused_and_recognised(trainer, rollouts):
    packed = rollouts["packed"]
    with pytest.raises(ValueError, match=r"packed \(layout='packed'\).*cu_seqlens=batch\['cu_seqlens'\]"):
        logprobs(trainer, packed)
    assert "Pass cu_seqlens" in exact.check(packed, logprobs(trainer, forgotten(packed))).cause


def test_other_weights_are_the_likely_cause_of_large_differences(trainer, batch):
    for parameter in trainer.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    report = exact.check(batch, logprobs(trainer, batch))
    assert report.num_different > 40 and report.first_different[0] == 0
    assert "weights that are not those of version 0" in report.cause and "Differences of this size" in str(report)


def test_rounding_is_the_likely_cause_of_small_ones(trainer, batch):
    values = logprobs(trainer, batch)
    assert "come from rounding" in exact.check(forgotten(batch), values.clone() + 1e-6).cause


def test_log_probs_one_column_off_and_nan_are_recognised(trainer, batch):
    values = logprobs(trainer, batch)
    assert "one column off" in exact.check(batch, values.roll(1, 1)).cause
    broken = values.clone()
    broken[tuple(batch["masks", "all_assistant_mask"][:, 1:].nonzero()[5])] = torch.nan
    report = exact.check(batch, broken)
    assert "1 of the trainer's log-probs are NaN" in report.cause and report.largest_difference == torch.inf


def test_what_is_no_rollout_is_refused(batch):
    with pytest.raises(ValueError, match=r"what RolloutPolicy\.rollout returned, got Tensor: call exact\.check"):
        exact.check(batch["tokens", "full"], batch["log_probs", "full"])


def test_another_shape_is_refused(batch):
    with pytest.raises(ValueError, match=r"one for each token after the first.*got \(4,"):
        exact.check(batch, batch["log_probs", "full"])


def test_versions_are_told_apart_and_mixed_context_is_left_out(trainer, batch):
    values = logprobs(trainer, batch)
    later = copy.deepcopy(forgotten(batch))
    half = later["masks", "all_assistant_mask"].cumsum(1) > 6
    for key in ("policy_version", "kv_min_version"):
        later[key][half & later["masks", "all_assistant_mask"]] = 1
    changed = torch.where(half[:, 1:], values + 0.5, values)
    report = exact.check(later, changed)
    assert "sampled by version 0 are equal, those by version 1 are not" in report.cause
    later["kv_min_version"][half & later["masks", "all_assistant_mask"]] = 0
    report = exact.check(later, changed)
    assert report.is_exact and report.num_mixed == 24 and "24 more" in str(report)


def test_notes_do_not_survive_where_they_could_mislead():
    model = exact.enable(tiny_model("qwen3"))
    ids = torch.randint(3, 259, (1, 9))
    values = exact.token_logprobs(model, ids)
    assert logprobs_note(values).is_enabled and logprobs_note(values[:, 1:]) is None
