"""The policy on a real tiny model: rollouts are exact, weights change as transactions, nothing is left behind."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import concat, errors, exact, minibatches
from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint, tiny_model

PROMPTS = ["a", "some words", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, dtype):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=dtype)


@pytest.fixture
def policy(checkpoint, dtype):
    name = str(dtype).removeprefix("torch.")
    with RolloutPolicy.from_pretrained(checkpoint, dtype=name, num_kv_blocks=256, max_model_len=256) as policy:
        yield policy
        assert not policy.engine.has_unfinished_requests()
        assert policy.engine.get_cache_usage() == 0


def trainer_for(checkpoint, dtype):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype))


def trainer_logprobs(trainer, batch, temperature=1.0):
    ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer, ids, mask, temperature=temperature)
    return torch.where(batch["masks", "all_assistant_mask"][:, 1:], logprobs, 0.0)


def rollout(policy, params=PARAMS, **options):
    return policy.rollout(PROMPTS, params, **({"use_tqdm": False, "num_samples": 3, "seed": 1} | options))


def perturbed(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05)
    return model


@pytest.mark.quick(1)
def test_rollout_score_and_trainer_agree_bit_for_bit(policy, checkpoint, dtype):
    hot = SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True)
    trainer = trainer_for(checkpoint, dtype)
    for params, temperature in ((PARAMS, 1.0), (hot, 0.7)):
        batch = rollout(policy, params)
        assert batch["masks", "all_assistant_mask"].sum() == 9 * 24
        assert torch.equal(trainer_logprobs(trainer, batch, temperature), batch["log_probs", "full"][:, 1:])
        assert torch.equal(policy.score(batch, temperature), batch["log_probs", "full"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_whole_batch_brings_its_temperature_and_layout(policy, checkpoint, dtype, layout):
    trainer = trainer_for(checkpoint, dtype)
    batch = rollout(policy, SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True), layout=layout)
    expected = batch["log_probs", "full"][:, 1:]
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer, batch)
        assert torch.equal(logprobs[expected != 0], expected[expected != 0]) and exact.check(batch, logprobs).is_exact
        for part in minibatches(batch, 4):
            assert exact.check(part, exact.token_logprobs(trainer, part)).is_exact
        assert torch.equal(exact.token_logprobs_and_entropies(trainer, batch)[0], logprobs)
        plain = batch.to_tensordict()
        assert torch.equal(exact.token_logprobs(trainer, plain, temperature=0.7), logprobs)
        with pytest.raises(
            RequestError, match="temperature=None is not allowed.*it is a plain TensorDict: give the one"
        ):
            exact.token_logprobs(trainer, plain)
    with pytest.raises(RequestError, match="attention_mask=.*must be left out: the batch has it"):
        exact.token_logprobs(trainer, batch, batch["masks", "all_attention_mask"])
    with pytest.raises(RequestError, match=r"batch.keys\(\)=.*with \('tokens', 'full'\)"):
        exact.token_logprobs(trainer, batch.exclude("tokens"))


def test_a_batch_of_several_temperatures_says_that_it_has_none(policy, checkpoint, dtype):
    both = concat([rollout(policy, SamplingParams(max_tokens=4, temperature=t)) for t in (0.7, 1.0)])
    with pytest.raises(
        RequestError,
        match="temperature=None.*its log-probs are of several, or of edited logits.*truncation .*return_support=True",
    ):
        exact.token_logprobs(trainer_for(checkpoint, dtype), both)


def test_packed_scores_equal_packed_log_probs(policy):
    batch = rollout(policy, layout="packed")
    assert torch.equal(policy.score(batch), batch["log_probs", "full"])


def test_the_same_seed_gives_the_same_rollout(policy):
    first, second = rollout(policy, seed=5), rollout(policy, seed=5)
    assert torch.equal(first["tokens", "full"], second["tokens", "full"])
    assert torch.equal(first["log_probs", "full"], second["log_probs", "full"])
    assert not torch.equal(first["tokens", "response"], rollout(policy, seed=6)["tokens", "response"])


def test_after_an_update_policy_and_trainer_agree_again(policy, checkpoint, dtype):
    trainer = trainer_for(checkpoint, dtype)
    rollout(policy)
    for version in (1, 2):
        report = policy.update_weights(perturbed(trainer, version))
        batch = rollout(policy)
        assert report.version == policy.policy_version == version
        assert set(batch["policy_version"].unique().tolist()) == {-1, version}
        assert torch.equal(batch["policy_version"], batch["kv_min_version"])
        assert torch.equal(trainer_logprobs(trainer, batch), batch["log_probs", "full"][:, 1:])


def test_float32_masters_feed_the_engines_dtype(policy, checkpoint, dtype):
    masters = perturbed(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    policy.update_weights(masters)
    trainer = trainer_for(checkpoint, dtype)
    trainer.load_state_dict(masters.state_dict())  # casts; masters.to(dtype) would round the rotary frequencies as well
    batch = rollout(policy)
    assert torch.equal(trainer_logprobs(trainer, batch), batch["log_probs", "full"][:, 1:])


def test_a_refused_update_leaves_the_policy_as_it_was(policy, dtype):
    before = rollout(policy)
    bad = tiny_model(seed=1, dtype=dtype).state_dict()
    nan = bad | {"model.norm.weight": torch.full_like(bad["model.norm.weight"], float("nan"))}
    with pytest.raises(errors.ChecksumError, match="'model.norm.weight' has values that are NaN"):
        policy.update_weights(nan)
    missing = {name: tensor for name, tensor in bad.items() if "layers.1.mlp" not in name}
    with pytest.raises(errors.ManifestMismatchError, match=r"3 tensors are missing: model\.layers\.1\.mlp"):
        policy.update_weights(missing)
    after = rollout(policy)
    assert policy.policy_version == 0
    assert torch.equal(before["log_probs", "full"], after["log_probs", "full"])


def test_an_update_between_groups_shows_in_the_versions(policy, checkpoint, dtype):
    trainer = trainer_for(checkpoint, dtype)

    async def main():
        params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (2, 24, 24)]
        batches = []
        async for batch in policy.arollout(PROMPTS, params, seed=1):
            if not batches:
                report = policy.update_weights(perturbed(trainer), kv="recompute")
                assert report.num_in_flight == 2
            batches.append(batch)
        return batches

    first, *others = asyncio.run(main())
    assert first["policy_version"].max() == 0
    for batch in others:
        new = batch["policy_version"] == 1
        assert 0 < new.sum() < 24
        assert (batch["kv_min_version"][new] == 1).all()
        logprobs = trainer_logprobs(trainer, batch)
        assert torch.equal(logprobs[new[:, 1:]], batch["log_probs", "full"][:, 1:][new[:, 1:]])


def test_a_bad_reward_leaves_the_engine_usable(policy):
    before = rollout(policy)
    with pytest.raises(errors.RewardError, match="the reward is nan"):
        rollout(policy, reward_fn=lambda *_: [float("nan")] * 3)
    assert torch.equal(rollout(policy)["tokens", "full"], before["tokens", "full"])


def test_truncated_sampling_carries_the_kept_mass(policy):
    batch = rollout(policy, SamplingParams(max_tokens=8, top_k=5, ignore_eos=True))
    kept = batch["kept_logprob_mass"][batch["masks", "response"]]
    assert (kept <= 0).all() and (kept < 0).any()
