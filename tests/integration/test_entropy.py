"""Entropies of sampled tokens: the trainer's to the bit, however they are drawn and sent."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams, concat, exact, minibatches
from rollout_engine.base.errors import RequestError
from rollout_engine.testing import tiny_checkpoint

PROMPTS = ["a", "some words", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True, entropy=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, dtype):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=getattr(torch, dtype))


@pytest.fixture(scope="module")
def policy(checkpoint, dtype):
    with RolloutPolicy.from_pretrained(checkpoint, dtype=dtype, max_model_len=256, speculation="auto") as policy:
        yield policy


@pytest.fixture(scope="module")
def trainer(checkpoint, dtype):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)))


def rollout(policy, params=PARAMS, **options):
    return policy.rollout(PROMPTS, params, **({"use_tqdm": False, "num_samples": 2, "seed": 1} | options))


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"logprobs_mode": "raw", "top_k": 5, "top_p": 0.9},
        {"logprobs_mode": "processed", "presence_penalty": 1.0, "temperature": 1.3},
    ],
    ids=str,
)
def test_the_trainer_has_the_bits_of_a_rollouts_entropies(policy, trainer, changes, layout):
    batch = rollout(policy, PARAMS.clone(**changes), layout=layout)
    mask = batch["masks", "all_assistant_mask"]
    entropies = batch["entropy", "full"]
    assert entropies.dtype == torch.float32 and entropies.shape == mask.shape
    assert bool((entropies[mask] > 0).all()) and not entropies[~mask].any()
    found = exact.token_entropy(trainer, batch)
    assert torch.equal(torch.where(mask[:, 1:], found, 0.0), entropies[:, 1:])
    for part in minibatches(batch, 4):
        sampled = part["masks", "all_assistant_mask"][:, 1:]
        ours = exact.token_entropy(trainer, part)
        assert torch.equal(ours[sampled], part["entropy", "full"][:, 1:][sampled])
    if changes.get("logprobs_mode") != "processed":  # of edited logits
        logprobs, entropies = exact.token_logprobs_and_entropies(trainer, batch)
        assert torch.equal(entropies, found) and not entropies.requires_grad and logprobs.requires_grad
    found.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.parameters())
    trainer.zero_grad()


def test_a_plain_batch_needs_a_temperature(policy, trainer):
    batch = rollout(policy)
    with pytest.raises(RequestError, match="temperature=None is not allowed.*plain TensorDict"):
        exact.token_entropy(trainer, batch.to_tensordict())
    whole = concat([batch, rollout(policy, seed=2)])
    assert exact.token_entropy(trainer, whole).shape[0] == 12
    with pytest.raises(RequestError, match="sampled at several"):
        exact.token_entropy(trainer, concat([batch, rollout(policy, PARAMS.clone(temperature=1.0))]))


def test_entropies_are_over_no_support(policy, trainer):
    batch = rollout(policy)
    for compute in (exact.token_entropy, exact.token_logprobs_and_entropies):
        with pytest.raises(RequestError, match="support='list' .*left out. Entropies are of the tempered"):
            compute(trainer, batch, support=[])


def test_only_rows_that_ask_have_entropies_and_tokens_do_not_change(policy):
    llm = LLM.from_engine(policy.engine)
    params = [PARAMS.clone(seed=3), PARAMS.clone(seed=3, entropy=False), PARAMS.clone(seed=3, output_kind="delta")]
    asked, plain, again = (output.outputs[0] for output in llm.generate(["same"] * 3, params, use_tqdm=False))
    assert plain.entropies is None and plain.token_ids == asked.token_ids
    assert asked.entropies.dtype == np.float32 and len(asked.entropies) == 12
    assert np.array_equal(asked.entropies, again.entropies)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_streams_from_other_processes_carry_what_is_new(checkpoint, dtype, policy, replicas):
    expected = LLM.from_engine(policy.engine).generate("same", PARAMS.clone(seed=3), use_tqdm=False)[0].outputs[0]

    async def parts():
        engine = AsyncLLM(checkpoint, dtype=dtype, max_model_len=256, num_replicas=replicas)
        try:
            found = []
            async for output in engine.generate("same", PARAMS.clone(seed=3, output_kind="delta"), request_id="a"):
                found += [sample.entropies for sample in output.outputs]
            return found
        finally:
            engine.shutdown()

    found = asyncio.run(parts())
    assert len(found) > 1
    assert np.array_equal(np.concatenate(found), expected.entropies)
