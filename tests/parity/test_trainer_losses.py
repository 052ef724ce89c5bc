"""Loss code as trainers have it, on rollouts of both layouts: on policy, every ratio is exactly 1.0."""

import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, advantages, concat, exact, minibatches, to_trl
from rollout_engine.batches.layout import is_packed, num_sequences

PROMPTS = ["a", "some words", "a prompt of more than sixty-four tokens, so that it spans more than one tile of KV"]
TEMPERATURE, CLIP = 0.8, 0.2


def reward(prompts, completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def trainer(checkpoint):
    return exact.enable(AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float32))


@pytest.fixture(scope="module")
def rollouts(checkpoint):
    """The same rollout in both layouts; its sequences have different lengths, and some are cut off."""
    with RolloutPolicy.from_pretrained(checkpoint("qwen3"), dtype="float32", max_model_len=256) as policy:
        params = [SamplingParams(max_tokens=n, temperature=TEMPERATURE, ignore_eos=True) for n in (5, 9, 14)]
        common = dict(num_samples=4, reward_fn=reward, seed=3, use_tqdm=False)
        return {layout: policy.rollout(PROMPTS, params, layout=layout, **common) for layout in ("padded", "packed")}


@pytest.fixture(params=["padded", "packed", "joined", "minibatch"])
def batch(request, rollouts):
    """As it was sampled, in either layout, and as `concat` and `minibatches` make it of the padded one."""
    if request.param == "joined":
        return concat(minibatches(rollouts["padded"], 5), group_ids="keep")
    if request.param == "minibatch":
        return next(minibatches(rollouts["packed"], 8, generator=torch.Generator().manual_seed(0), keep_groups=True))
    return rollouts[request.param]


def trainer_logprobs(trainer, batch):
    """[.., T - 1]: of every token but the first."""
    how = {"cu_seqlens": batch["cu_seqlens"]} if is_packed(batch) else {}
    mask = None if is_packed(batch) else batch["masks", "all_attention_mask"]
    return exact.token_logprobs(trainer, batch["tokens", "full"], mask, temperature=TEMPERATURE, **how)


def learn(trainer, loss):
    """Whether the loss reaches the weights."""
    trainer.zero_grad()
    loss.backward()
    return sum(parameter.grad.abs().sum() for parameter in trainer.parameters()) > 0


def clipped(ratio, advantage):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def test_the_ratios_of_grpo_are_one(trainer, batch):
    advantage = advantages.per_token(batch, advantages.grpo(batch["next", "reward"], batch["group_id"]))
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    ratio = (trainer_logprobs(trainer, batch) - batch["log_probs", "full"][:, 1:]).exp()
    assert sampled.any() and (ratio[sampled] == 1.0).all()
    loss = clipped(ratio, advantage[:, 1:])[sampled].mean()
    assert loss == -advantage[:, 1:][sampled].mean() and learn(trainer, loss)


def test_the_ratios_of_ppo_are_one(trainer, rollouts):
    batch = rollouts["padded"]
    sampled, old = batch["masks", "all_assistant_mask"][:, 1:], batch["log_probs", "full"][:, 1:]
    values = torch.randn(sampled.shape, generator=torch.Generator().manual_seed(0))
    final = torch.zeros(len(values))
    advantage, target = advantages.gae(
        batch["next", "reward"], values, sampled, truncated=batch["truncated"], final_values=final, gamma=0.99
    )
    batch = batch.copy()
    batch["advantage"], batch["target"] = advantage, target
    for part in minibatches(batch, 5, shuffle=True):
        here, old = part["masks", "all_assistant_mask"][:, 1:], part["log_probs", "full"][:, 1:]
        ratio = (trainer_logprobs(trainer, part) - old).exp()[here]
        assert (ratio == 1.0).all()
        assert learn(trainer, clipped(ratio, part["advantage"][here]).mean())


def test_the_ratios_of_ppo_are_one_on_packed_rows(trainer, rollouts):
    batch = rollouts["packed"]
    sampled, values = batch["masks", "all_assistant_mask"], torch.zeros(batch["tokens", "full"].shape)
    advantage, _ = advantages.gae(batch["next", "reward"], values, sampled, cu_seqlens=batch["cu_seqlens"], gamma=0.99)
    ratio = (trainer_logprobs(trainer, batch) - batch["log_probs", "full"][:, 1:]).exp()[sampled[:, 1:]]
    assert (ratio == 1.0).all()
    assert learn(trainer, clipped(ratio, advantage[:, 1:][sampled[:, 1:]]).mean())


def test_the_ratios_of_trls_loss_are_one(trainer, batch):
    inputs = to_trl(batch, advantages.rloo(batch["next", "reward"], batch["group_id"]))
    # As GRPOTrainer._compute_loss: prompts and completions side by side, log-probs of the last R tokens.
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits_to_keep = inputs["completion_ids"].size(1)
    logprobs = exact.token_logprobs(trainer, input_ids, attention_mask, temperature=TEMPERATURE)[:, -logits_to_keep:]
    mask = inputs["completion_mask"]
    ratio = torch.exp(logprobs - inputs["old_per_token_logps"])
    assert mask.sum() == inputs["num_items_in_batch"] and (ratio[mask.bool()] == 1.0).all()
    importance = torch.exp((inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask)
    assert (importance == 1.0).all()
    per_token = clipped(ratio, inputs["advantages"].unsqueeze(1)) * importance
    assert learn(trainer, ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean())


def test_the_ratios_of_torchrls_loss_are_one(trainer, batch):
    batch = batch.copy()
    each = advantages.grpo(batch["next", "reward"], batch["group_id"], scale=False)
    batch["advantage"] = advantages.per_token(batch, each).unsqueeze(-1)
    # As GRPOLoss.forward with masking_strategy="rlhf": a log-prob stands at its own token, the first token has none.
    mask = batch.get(("masks", "all_assistant_mask"))
    current = pad(trainer_logprobs(trainer, batch), (1, 0))
    previous = batch.get(("log_probs", "full"))
    assert current.shape == previous.shape == batch.get(("tokens", "full")).shape
    log_weight = (torch.where(mask, current, 0.0) - torch.where(mask, previous, 0.0)).unsqueeze(-1)
    assert (log_weight.exp() == 1.0).all()
    weights = log_weight.squeeze(-1)[mask]
    effective = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp() / mask.sum()
    assert effective.item() == pytest.approx(1.0)
    assert learn(trainer, clipped(log_weight.exp(), batch["advantage"])[mask].mean())


def test_the_same_sequences_have_the_same_bits_in_every_shape(trainer, rollouts):
    padded, packed = rollouts["padded"], rollouts["packed"]
    real = padded["masks", "all_assistant_mask"][:, 1:]
    mine, theirs = (trainer_logprobs(trainer, batch) for batch in (padded, packed))
    assert torch.equal(mine[real], theirs[packed["masks", "all_assistant_mask"][:, 1:]])
    assert num_sequences(padded) == num_sequences(packed) == 12
