"""Log-probs of given tokens at every place of a rollout: parts of the full log-softmax, bit for bit."""

import numpy as np
import pytest
import torch

from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams
from rollout_engine.base.errors import RequestError
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.cpu import sequence_logprobs
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model

PROMPTS = ["one prompt that several samples share", "another", "x"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
SIZES = dict(num_kv_blocks=128, max_model_len=128, log_stats=False)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, dtype):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=getattr(torch, dtype))


@pytest.fixture(scope="module")
def policy(checkpoint, dtype):
    with RolloutPolicy.from_pretrained(checkpoint, dtype=dtype, **SIZES) as made:
        yield made


def rollout(policy, **options):
    return policy.rollout(PROMPTS, PARAMS, num_samples=3, seed=1, use_tqdm=False, **options)


def random_candidates(batch, k=5, vocab_size=259, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (*batch["tokens", "full"].shape, k), generator=generator)


def whole_rows(engine, batch, temperature=0.8):
    """By steps: float32 [sampled tokens, V], log-probs of the whole vocabulary at every sampled token, in order."""
    params = SamplingParams(max_tokens=1, temperature=temperature, prompt_logprobs=-1)
    tokens, sampled = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
    lengths = batch["masks", "all_attention_mask"].sum(1).tolist()
    given = [tokens[row, :n].tolist() for row, n in enumerate(lengths)]
    rows = []
    for index, output in enumerate(LLM.from_engine(engine).generate(given, params, use_tqdm=False)):
        ids, values = output.prompt_top_logprobs
        by_id = np.full((len(given[index]), 259), np.nan, np.float32)
        np.put_along_axis(by_id, np.where(ids < 0, 0, ids), values, axis=1)
        rows.append(torch.from_numpy(by_id)[sampled[index, : len(given[index])]])
    return torch.cat(rows)


def test_candidates_are_parts_of_the_whole_log_softmax_to_the_bit(policy):
    batch = rollout(policy)
    candidates, sampled = random_candidates(batch), batch["masks", "all_assistant_mask"]
    found = policy.score(batch, 0.8, candidate_ids=candidates)
    assert found.dtype == torch.float32 and found.shape == candidates.shape and not found[~sampled].any()
    expected = whole_rows(policy.engine, batch).gather(1, candidates[sampled])
    assert torch.equal(found[sampled], expected)
    own = policy.score(batch, 0.8, candidate_ids=batch["tokens", "full"][..., None])
    assert torch.equal(own[..., 0], batch["log_probs", "full"])


def test_packed_rows_and_other_integers_give_the_same(policy):
    padded, packed = rollout(policy), rollout(policy, layout="packed")
    candidates = random_candidates(padded)
    real = padded["masks", "all_attention_mask"]
    found = policy.score(padded, 0.8, candidate_ids=candidates)
    other = policy.score(packed, 0.8, candidate_ids=candidates[real][None].to(torch.int32))
    assert torch.equal(found[real][None], other)


def test_ids_outside_the_assistant_mask_are_not_read(policy):
    batch = rollout(policy)
    candidates, sampled = random_candidates(batch), batch["masks", "all_assistant_mask"]
    expected = policy.score(batch, candidate_ids=candidates)
    padded = candidates.masked_fill(~sampled[..., None], -1)
    assert torch.equal(policy.score(batch, candidate_ids=padded), expected)


def test_candidates_that_do_not_fit_are_refused_by_name(policy):
    batch = rollout(policy)
    candidates = random_candidates(batch)
    row, column = batch["masks", "all_assistant_mask"].nonzero()[3].tolist()
    for value in (-1, 259):
        wrong = candidates.clone()
        wrong[row, column, 2] = value
        words = rf"candidate_ids\[{row}, {column}, 2\]={value} is not allowed: must be in \[0, 259\)"
        with pytest.raises(RequestError, match=words):
            policy.score(batch, candidate_ids=wrong)
    for wrong in (candidates[:, :-1], candidates[..., 0], candidates.float(), [[1]], candidates.bool()):
        with pytest.raises(RequestError, match="candidate_ids=.* must be a tensor of integers"):
            policy.score(batch, candidate_ids=wrong)
    pairs = [[5, 6]], [[7, 8]]
    for wrong in (np.zeros((3, 1), int), np.zeros(2, int), np.zeros((2, 1))):
        with pytest.raises(RequestError, match=r"candidate_ids=.* must be integers \[2, K\]"):
            policy.score_candidates(*pairs, wrong)
    with pytest.raises(RequestError, match=r"candidate_ids\[1\]\[0\]=300"):
        policy.score_candidates(*pairs, [[5], [300]])
    with pytest.raises(RequestError, match="candidate_ids"):
        policy.score_candidates(*pairs, [[5], [5, 6]])
    for wrong in (-1, 260):
        with pytest.raises(RequestError, match="top_k"):
            policy.score_candidates(*pairs, top_k=wrong)


def test_the_most_likely_tokens_are_those_of_steps(policy):
    batch = rollout(policy)
    prompts, completions = [[5, 6, 7], [8]], [[9, 10, 11], [12]]
    found = policy.score_candidates(prompts, completions, top_k=4)
    whole = LLM.from_engine(policy.engine).generate(
        [p + c for p, c in zip(prompts, completions, strict=True)],
        SamplingParams(max_tokens=1, prompt_logprobs=4),
        use_tqdm=False,
    )
    ids, values = (
        np.concatenate([output.prompt_top_logprobs[i][len(p) :] for output, p in zip(whole, prompts, strict=True)])
        for i in (0, 1)
    )
    assert np.array_equal(found.top_ids, ids) and np.array_equal(found.top_logprobs, values)
    assert found.candidates is None and found.logprobs.shape == (4,)
    assert batch["masks", "all_assistant_mask"].any()


def test_a_prompt_that_samples_share_is_computed_once(policy, monkeypatch):
    batch = rollout(policy)
    module = policy.engine.frontend.client.driver.executor.worker.module
    policy.score(batch)  # the first score tries whether prompts may be shared
    computed = []
    hook = module.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        expected = policy.score(batch, 0.8)
        once = sum(computed)
        computed.clear()
        monkeypatch.setattr(sequence_logprobs, "_TOKENS", 20)  # groups stay together, up to four times as many
        assert torch.equal(policy.score(batch, 0.8), expected)
    finally:
        hook.remove()
    num_prompt, num_samples = batch["num_prompt_tokens"], batch["masks", "all_assistant_mask"].sum().item()
    assert once <= num_prompt[::3].sum().item() + num_samples
    assert len(computed) == 3 and torch.equal(expected, batch["log_probs", "full"])


def test_heads_are_computed_a_piece_at_a_time(policy, monkeypatch):
    batch = rollout(policy)
    candidates = random_candidates(batch)
    expected = policy.score(batch, 0.8, candidate_ids=candidates)
    monkeypatch.setattr("rollout_engine.model.sampling.logit_rows._PIECE_NUMEL", 259 * 5)
    assert torch.equal(policy.score(batch, 0.8, candidate_ids=candidates), expected)


def test_adapters_score_candidates(checkpoint, dtype):
    with RolloutPolicy.from_pretrained(checkpoint, dtype=dtype, max_loras=1, max_lora_rank=8, **SIZES) as policy:
        policy.add_lora(random_adapter(tiny_model(), "a", seed=1))
        batch = rollout(policy, lora_request="a")
        own = batch["tokens", "full"][..., None]
        found = policy.score(batch, 0.8, candidate_ids=own, lora="a")
        assert torch.equal(found[..., 0], batch["log_probs", "full"])
        assert not torch.equal(policy.score(batch, 0.8, candidate_ids=own), found)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_engine_elsewhere_and_a_fleet_score_the_same(policy, checkpoint, dtype, num_replicas):
    batch = rollout(policy)
    candidates = random_candidates(batch, k=64)
    expected = policy.score(batch, 0.8, candidate_ids=candidates)
    with RolloutPolicy(AsyncLLM(checkpoint, num_replicas=num_replicas, dtype=dtype, **SIZES)) as other:
        assert torch.equal(other.score(batch, 0.8, candidate_ids=candidates), expected)
        with pytest.raises(RequestError, match="top_k"):
            other.score_candidates([[5]], [[6]], top_k=10_000)


@pytest.mark.slow
@pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
def test_ranks_score_the_same(policy, checkpoint, dtype):
    batch = rollout(policy)
    candidates = random_candidates(batch)
    expected = policy.score(batch, 0.8, candidate_ids=candidates)
    with RolloutPolicy.from_pretrained(checkpoint, dtype=dtype, tensor_parallel_size=2, **SIZES) as ranked:
        assert torch.equal(ranked.score(batch, 0.8, candidate_ids=candidates), expected)
        top = ranked.score_candidates([[5, 6]], [[7, 8]], top_k=3)
    own = policy.score_candidates([[5, 6]], [[7, 8]], top_k=3)
    assert np.array_equal(top.top_ids, own.top_ids) and np.array_equal(top.top_logprobs, own.top_logprobs)
