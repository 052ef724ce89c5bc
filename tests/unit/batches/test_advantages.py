"""Advantages equal what their papers' formulas give, written out slowly in plain Python."""

import functools
import itertools
import random
import statistics

import pytest
import torch

from rollout_engine import RequestError, advantages

ROW_SHAPES = [lambda rewards: rewards, lambda rewards: rewards[:, None]]


def by_group(rewards, group_ids, one):
    """`one(reward, all of its group)` for every sample."""
    groups = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        groups.setdefault(group, []).append(reward)
    return [one(reward, groups[group]) for reward, group in zip(rewards, group_ids, strict=True)]


def slow_grpo(reward, group):
    return (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) if len(group) > 1 else 0.0


def slow_dr_grpo(reward, group):
    return reward - statistics.fmean(group)


def slow_rloo(reward, group):
    return reward - (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else 0.0


GROUPED = [
    (advantages.grpo, slow_grpo),
    (functools.partial(advantages.grpo, scale=False), slow_dr_grpo),
    (advantages.rloo, slow_rloo),
]


@pytest.mark.quick(59)
@pytest.mark.parametrize("function,slow", GROUPED, ids=["grpo", "dr-grpo", "rloo"])
@pytest.mark.parametrize("shaped", ROW_SHAPES, ids=["B", "B,1"])
@pytest.mark.parametrize("seed", range(10))
def test_groups_of_any_size_in_any_order(function, slow, shaped, seed):
    rng = random.Random(seed)
    group_ids = [rng.choice([3, 17, -1, 2**40]) for _ in range(30)] + [5]
    rewards = [rng.gauss(0, 3) for _ in group_ids]
    given = shaped(torch.tensor(rewards, dtype=torch.float64))
    found = function(given, torch.tensor(group_ids))
    assert found.shape == given.shape
    assert found.flatten().tolist() == pytest.approx(by_group(rewards, group_ids, slow), rel=1e-9, abs=1e-9)


def test_grpo_is_the_usual_expression_bit_for_bit():
    rewards = torch.randn(32, 8)
    usual = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.equal(advantages.grpo(rewards.flatten(), torch.arange(32).repeat_interleave(8)), usual.flatten())


@pytest.mark.parametrize("function", [function for function, _ in GROUPED], ids=["grpo", "dr-grpo", "rloo"])
def test_equal_rewards_teach_nothing_and_integers_will_do(function):
    assert function(torch.ones(6, dtype=torch.int64), torch.tensor([0, 0, 0, 1, 1, 1])).tolist() == [0.0] * 6
    assert len(function(torch.zeros(0), torch.zeros(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("function", [function for function, _ in GROUPED], ids=["grpo", "dr-grpo", "rloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_get_exactly_zero_whatever_their_value(function, dtype):
    for value, size in itertools.product([0.1, 0.35, -0.7, 12.34, -1234.1, 54321.1], [2, 3, 5, 6, 7, 12, 31]):
        rewards = torch.cat([torch.full((size,), value), torch.tensor([0.0, 1.0])]).to(dtype)
        found = function(rewards, torch.tensor([4] * size + [7, 7]))
        assert not found[:size].any() and found[size:].all(), (value, size)


@pytest.mark.parametrize("function,slow", GROUPED, ids=["grpo", "dr-grpo", "rloo"])
@pytest.mark.parametrize("shaped", ROW_SHAPES, ids=["B", "B,1"])
@pytest.mark.parametrize("seed", range(5))
def test_an_episode_of_several_rows_counts_once_and_one_that_is_masked_not_at_all(function, slow, shaped, seed):
    rng = random.Random(seed)
    episodes = [(rng.choice([3, 8]), number, rng.gauss(0, 3), rng.random() < 0.8) for number in range(10)]
    rows = [episode for episode in episodes for _ in range(rng.randint(1, 4))]
    rng.shuffle(rows)
    counted = [episode for episode in episodes if episode[3]]
    expected = dict(zip(counted, by_group([e[2] for e in counted], [e[0] for e in counted], slow), strict=True))
    group_ids, episode_ids, rewards, mask = (torch.tensor(column) for column in zip(*rows, strict=True))
    given = shaped(rewards.double())
    found = function(given, group_ids, episode_ids=episode_ids, mask=shaped(mask))
    assert found.shape == given.shape
    wanted = [expected.get(row, 0.0) for row in rows]
    assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("function", [function for function, _ in GROUPED], ids=["grpo", "dr-grpo", "rloo"])
def test_numbers_of_episodes_may_repeat_in_other_groups(function):
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(function(rewards, groups, episode_ids=torch.tensor([0, 1, 0, 1])), function(rewards, groups))


@pytest.mark.parametrize("function", [function for function, _ in GROUPED], ids=["grpo", "dr-grpo", "rloo"])
def test_a_group_of_which_all_or_all_but_one_are_masked_gets_zero(function):
    rewards, groups = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])
    for mask in ([True, False, False, False], [False] * 4):
        assert function(rewards, groups, mask=torch.tensor(mask)).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "options,message",
    [
        ({"mask": torch.ones(4)}, "mask='torch.float32' is not allowed: must be a tensor of torch.bool"),
        ({"mask": [True] * 4}, "mask='list' is not allowed: must be a tensor of torch.bool"),
        ({"mask": torch.ones(3).bool()}, r"mask.shape=\[3\] is not allowed: must be \[4\] or \[4, 1\]"),
        ({"episode_ids": [0, 1, 2, 3]}, "episode_ids='list' is not allowed: must be a tensor"),
        ({"episode_ids": torch.arange(3)}, r"episode_ids.shape=\[3\] is not allowed: must be \[4\]"),
        ({"episode_ids": torch.zeros(4)}, "samples per group=1 is not allowed"),
        (
            {"episode_ids": torch.tensor([0, 0, 1, 2])},
            r"rewards\[[01]\]=[01].0 is not allowed: must be [01].0, as in another row of its episode. To count",
        ),
    ],
)
def test_masks_and_episodes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        advantages.grpo(torch.arange(4.0), torch.zeros(4, dtype=torch.int64), **options)


@pytest.mark.parametrize("function", [advantages.grpo, advantages.rloo])
def test_rewards_whose_sums_overflow_are_refused(function):
    rewards, groups = torch.tensor([3e38, 3e38, 0.0]), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(
        RequestError, match=r"rewards=3.0\d*e\+38 is not allowed: .* finite in torch.float32. Give rewards.d"
    ):
        function(rewards, groups)
    assert function(rewards.double(), groups).isfinite().all()


@pytest.mark.parametrize("function", [advantages.grpo, advantages.rloo])
@pytest.mark.parametrize(
    "rewards,group_ids,message",
    [
        (torch.ones(3), torch.arange(3), "samples per group=1 is not allowed: must be at least 2.*num_samples"),
        (torch.ones(4, 2), torch.zeros(4), r"rewards.shape=\[4, 2\] is not allowed: must be \[4\] or \[4, 1\]"),
        (torch.ones(4), torch.zeros(4, 1), r"group_ids.shape=\[4, 1\] is not allowed: must be \[B\]"),
        (
            torch.tensor([0.0, float("nan")]),
            torch.zeros(2),
            r"rewards\[1\]=nan is not allowed: must be a finite number",
        ),
        ([1.0, 2.0], torch.zeros(2), "rewards='list' is not allowed: must be a tensor"),
        (torch.ones(2), [0, 0], "group_ids='list' is not allowed: must be a tensor"),
    ],
)
def test_what_cannot_be_compared_is_refused(function, rewards, group_ids, message):
    with pytest.raises(RequestError, match=message):
        function(rewards, group_ids)


def random_sequences(seed, num=7, width=11):
    """Rewards per token, values, and masks with gaps; the last row has no step at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num, width, generator=generator) < 0.6
    mask[-1] = False
    rewards, values = torch.randn(2, num, width, generator=generator, dtype=torch.float64)
    final, truncated = torch.randn(num, generator=generator, dtype=torch.float64), torch.arange(num) % 2 == 0
    return rewards, values, mask, final, truncated


def slow_gae(rewards, values, final_value, gamma, lam):
    """Equation 16 of the paper as it stands: the discounted sum of later surprises, for the steps of one sequence."""
    after = [*values, final_value][1:]
    surprises = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(surprises[t:])) for t in range(len(values))]


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_discounted_sum_of_later_surprises(gamma, lam, seed):
    rewards, values, mask, final, truncated = random_sequences(seed)
    found, target = advantages.gae(
        rewards, values, mask, truncated=truncated[:, None], final_values=final, gamma=gamma, lam=lam
    )
    for row in range(len(mask)):
        steps = mask[row]
        bootstrap = final[row].item() if truncated[row] else 0.0
        expected = slow_gae(rewards[row][steps].tolist(), values[row][steps].tolist(), bootstrap, gamma, lam)
        assert found[row][steps].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert torch.equal(target[mask], (found + values)[mask])
    assert not found[~mask].any() and not target[~mask].any()


def torchrl_gae(gamma, lmbda, state_value, next_state_value, reward, done, terminated):
    """TorchRL's `generalized_advantage_estimate` as published (torchrl/objectives/value/functional.py), over [B, T]."""
    delta = reward + gamma * (~terminated).int() * next_state_value - state_value
    discount = lmbda * gamma * (~done).int()
    advantage, previous = torch.empty_like(delta), 0
    for t in reversed(range(delta.shape[1])):
        previous = advantage[:, t] = delta[:, t] + previous * discount[:, t]
    return advantage, advantage + state_value


@pytest.mark.parametrize("seed", range(3))
def test_gae_is_torchrls_where_every_token_is_a_step(seed):
    rewards, values, mask, final, truncated = random_sequences(seed)
    done = torch.zeros_like(mask)
    done[:, -1] = True
    terminated = done & ~truncated[:, None]
    ahead = torch.cat([values[:, 1:], final[:, None]], 1)
    expected = torchrl_gae(0.97, 0.9, values, ahead, rewards, done, terminated)
    found = advantages.gae(
        rewards, values, torch.ones_like(mask), truncated=truncated, final_values=final, gamma=0.97, lam=0.9
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)  # theirs takes gamma in float32


@pytest.mark.parametrize("shaped", ROW_SHAPES, ids=["B", "B,1"])
def test_one_reward_per_sequence_is_paid_at_its_last_sampled_token(shaped):
    _, values, mask, _, _ = random_sequences(1)
    rewards, paid = torch.randn(len(mask), dtype=torch.float64), torch.zeros_like(values)
    for row, steps in enumerate(mask):
        if steps.any():
            paid[row, steps.nonzero().max()] = rewards[row]
    found, expected = (advantages.gae(given, values, mask) for given in (shaped(rewards), paid))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_sequence_that_was_cut_off_expects_what_the_critic_expects():
    values, mask = torch.tensor([[0.5], [0.5]]), torch.ones(2, 1, dtype=torch.bool)
    found, target = advantages.gae(
        torch.zeros(2), values, mask, truncated=torch.tensor([True, False]), final_values=torch.tensor([0.8, 0.8])
    )
    assert found.flatten().tolist() == pytest.approx([0.3, -0.5])
    assert target.flatten().tolist() == pytest.approx([0.8, 0.0])


def test_what_the_critic_says_outside_the_mask_does_not_matter():
    rewards, values, mask, _, _ = random_sequences(2)
    expected = advantages.gae(rewards, values, mask)
    found = advantages.gae(rewards, values.masked_fill(~mask, float("nan")), mask)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_advantages_carry_no_gradient():
    values = torch.randn(2, 3, requires_grad=True)
    assert not any(each.requires_grad for each in advantages.gae(torch.ones(2), values, torch.ones(2, 3).bool()))
    assert not advantages.grpo(values[0].detach().requires_grad_(), torch.zeros(3)).requires_grad


@pytest.mark.parametrize(
    "change,message",
    [
        ({"mask": torch.ones(2, 3)}, r"mask='torch.float32 \[2, 3\]' is not allowed: must be torch.bool \[2, 3\]"),
        ({"mask": torch.ones(2, 2).bool()}, r"mask='torch.bool \[2, 2\]'"),
        ({"values": torch.ones(2)}, r"values.shape=\[2\] is not allowed: must be \[B, T\]"),
        ({"rewards": torch.ones(3)}, r"rewards.shape=\[3\] is not allowed: must be \[2\] or \[2, 1\]"),
        ({"truncated": torch.ones(2).bool()}, "arguments given=.* is not allowed: must be both or neither"),
        ({"final_values": torch.ones(2)}, "must be both or neither"),
        ({"truncated": torch.ones(2).bool(), "final_values": torch.ones(2, 3)}, r"final_values.shape=\[2, 3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    given = {"rewards": torch.ones(2), "values": torch.ones(2, 3), "mask": torch.ones(2, 3).bool()} | change
    with pytest.raises(RequestError, match=message):
        advantages.gae(**given)


def test_gae_of_packed_rows_is_that_of_padded_ones():
    lengths, width = torch.tensor([4, 1, 7, 2]), 7
    real = torch.arange(width) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    values, paid = (torch.randn(4, width, generator=generator).masked_fill(~real, 0.0) for _ in range(2))
    mask, once = real & (torch.arange(width) > 0) | (lengths == 1)[:, None] & real, torch.randn(4, generator=generator)
    ends = dict(truncated=torch.tensor([True, False, True, False]), final_values=torch.randn(4, generator=generator))
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    for rewards, packed in ((once, once), (paid, paid[real][None])):
        padded = advantages.gae(rewards, values, mask, **ends)
        found = advantages.gae(packed, values[real][None], mask[real][None], cu_seqlens=edges, **ends)
        for mine, theirs in zip(found, padded, strict=True):
            assert torch.equal(mine, theirs[real][None])
    with pytest.raises(RequestError, match=r"values.shape=\[1, 13\].*\[1, 14\], by cu_seqlens"):
        advantages.gae(once, values[real][None, 1:], mask[real][None, 1:], cu_seqlens=edges)
