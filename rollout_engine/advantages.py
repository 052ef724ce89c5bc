"""Advantages: how much better an answer, or a token of it, was than expected.

    batch = policy.rollout(prompts, params, num_samples=8, reward_fn=reward)
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])   # [B, 1], one per sample
    advantage, target = advantages.gae(rewards, values, batch["masks", "all_assistant_mask"])  # [B, T]

None of them carries a gradient. `grpo` and `rloo` compare the samples of a prompt: call them on whole rollouts, before
`minibatches` cuts groups apart.
"""

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.batches.layout import check_batch, is_packed, num_sequences
from rollout_engine.errors import RequestError

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


@torch.no_grad()
def grpo(rewards: Tensor, group_ids: Tensor, *, scale: bool = True) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation; shape and order of `rewards`.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with G - 1 in the denominator (DeepSeekMath, Shao et al., 2024, section
    4.1.2). `scale=False` leaves the division out: Dr. GRPO (Liu et al., 2025), where hard and easy prompts do not
    weigh more than others. Samples that are as good as their whole group get 0, and so does a sample without others.

    Args:
        rewards: [B] or [B, 1], finite.
        group_ids: [B], equal for samples of one prompt; groups may differ in size and lie in any order.

    Raises `RequestError` for other shapes, for rewards that are not finite, and if no group has two samples.
    """
    rewards, flat = _checked(rewards, group_ids)
    advantages = torch.zeros_like(flat)
    for rows in _groups(group_ids):
        group = flat[rows]  # [number of groups, size]
        centred = group - group.mean(1, keepdim=True)
        if scale and group.shape[1] > 1:
            centred = centred / (group.std(1, keepdim=True) + EPSILON)
        advantages[rows] = centred
    return advantages.view_as(rewards)


@torch.no_grad()
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of the *other* samples of its group; shape and order of `rewards`.

    A_i = r_i - sum_{j != i} r_j / (G - 1) (REINFORCE leave-one-out: Kool et al., 2019; Ahmadian et al., 2024, section
    3.2): a baseline that does not depend on the sample it is for. A sample without others gets 0. Arguments and errors
    as for `grpo`.
    """
    rewards, flat = _checked(rewards, group_ids)
    advantages = torch.zeros_like(flat)
    for rows in _groups(group_ids):
        group = flat[rows]
        if group.shape[1] > 1:
            advantages[rows] = group - (group.sum(1, keepdim=True) - group) / (group.shape[1] - 1)
    return advantages.view_as(rewards)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates, and targets for the critic, of every sampled token: [B, T] each, 0 elsewhere.

    d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  target_t = A_t + V_t  (Schulman et al., 2016,
    equations 11 and 16). The steps t of a sequence are its sampled tokens; text between them is no step. After the
    last one A is 0, and V is 0 where the sequence ended by itself.

    Args:
        rewards: [B] or [B, 1], paid at the last sampled token; or [B, T], paid at each.
        values: [B, T], what the critic expected before each token.
        mask: [B, T] bool, the sampled tokens. A padded batch's all_assistant_mask, or the columns of it (`[:, 1:]`)
            that `values` has.
        truncated: [B] or [B, 1] bool, sequences that were cut off: more reward might have come, so V after their last
            token is not 0 but that of `final_values`. Given with those, or not at all (a cut counts as an end).
        final_values: [B] or [B, 1], what the critic expects after the last sampled token. Read where `truncated`.
        cu_seqlens: [B + 1], a packed batch's: then rewards per token, values, mask and results are [1, N], its rows.
        gamma: discount per token.
        lam: 0 trusts the critic alone, 1 the rewards alone.

    Raises `RequestError` for shapes that do not fit.
    """
    if cu_seqlens is not None:
        apart = _Apart(cu_seqlens, values)
        paid_each = apart.spread(rewards) if rewards.shape == values.shape else rewards
        ends = dict(truncated=truncated, final_values=final_values)
        both = gae(paid_each, apart.spread(values), apart.spread(mask), **ends, gamma=gamma, lam=lam)
        return apart.gather(both[0]), apart.gather(both[1])
    num, width = _check_values(values, mask)
    if (truncated is None) != (final_values is None):
        given = {"truncated": truncated is not None, "final_values": final_values is not None}
        raise RequestError.for_field("arguments given", given, "both or neither")
    value_after = torch.zeros_like(values[:, :1]).squeeze(1)
    if truncated is not None and final_values is not None:
        ahead = _one_each("final_values", final_values, num).to(values)
        value_after = torch.where(_one_each("truncated", truncated, num).bool(), ahead, value_after)
    paid = _per_step(rewards, mask).to(values)
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(value_after)  # advantage of the step after
    for t in reversed(range(width)):
        here = mask[:, t]
        delta = paid[:, t] + gamma * value_after - values[:, t]
        advantages[:, t] = torch.where(here, delta + gamma * lam * following, 0)
        following = torch.where(here, advantages[:, t], following)
        value_after = torch.where(here, values[:, t], value_after)
    return advantages, torch.where(mask, advantages + values, 0)


def per_token(batch: TensorDictBase, advantages: Tensor) -> Tensor:
    """One value per sequence, [B] or [B, 1], at every token of it: the shape of ("tokens", "full") in either layout."""
    num = num_sequences(check_batch(batch))
    each = _one_each("advantages", advantages, num)
    if is_packed(batch):
        return each.repeat_interleave(batch["cu_seqlens"].diff())[None]
    return each[:, None].expand(batch["tokens", "full"].shape)


class _Apart:
    """Packed rows [1, N] with each sequence in a row of its own, and back."""

    def __init__(self, cu_seqlens: Tensor, values: Tensor) -> None:
        num_tokens = int(cu_seqlens[-1])
        if tuple(values.shape) != (1, num_tokens):
            hint = "They are those of all tokens, the first of each sequence too."
            raise RequestError.for_field("values.shape", list(values.shape), f"[1, {num_tokens}], by cu_seqlens", hint)
        lengths = cu_seqlens.diff()
        self._shape = len(lengths), int(lengths.max())
        self._row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        self._column = torch.arange(num_tokens, device=lengths.device) - cu_seqlens[:-1].repeat_interleave(lengths)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, N] -> [B, T], zeros behind each sequence."""
        return packed.new_zeros(self._shape).index_put((self._row, self._column), packed[0])

    def gather(self, rows: Tensor) -> Tensor:
        """[B, T] -> [1, N]."""
        return rows[self._row, self._column][None]


def _checked(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The rewards as floats, and flat."""
    if group_ids.dim() != 1:
        raise RequestError.for_field("group_ids.shape", list(group_ids.shape), "[B]")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    flat = _one_each("rewards", rewards, len(group_ids))
    if not flat.isfinite().all():
        row = int((~flat.isfinite()).nonzero()[0])
        raise RequestError.for_field(f"rewards[{row}]", flat[row].item(), "a finite number")
    if len(group_ids) and int(group_ids.unique(return_counts=True)[1].max()) == 1:
        hint = "Ask for more samples of each prompt: rollout(num_samples=8)."
        raise RequestError.for_field("samples per group", 1, "at least 2, to be compared", hint)
    return rewards, flat


def _groups(group_ids: Tensor) -> Iterator[Tensor]:
    """The rows of all groups of one size, [number of groups, size], for every size."""
    _, number, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    order, starts = number.argsort(stable=True), sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        yield order[starts[sizes == size][:, None] + torch.arange(size, device=group_ids.device)]


def _check_values(values: Tensor, mask: Tensor) -> tuple[int, int]:
    if values.dim() != 2:
        raise RequestError.for_field("values.shape", list(values.shape), "[B, T]")
    if mask.shape != values.shape or mask.dtype != torch.bool:
        raise RequestError.for_field("mask", f"{mask.dtype} {list(mask.shape)}", f"torch.bool {list(values.shape)}")
    return values.shape[0], values.shape[1]


def _per_step(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards [B, T]: as given, or at the last True of each row."""
    if rewards.shape == mask.shape and rewards.shape[1] != 1:
        return rewards
    last = mask.long().cumsum(1).argmax(1)  # the first column to reach the row's count
    paid = torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
    return paid.scatter(1, last[:, None], _one_each("rewards", rewards, len(mask))[:, None])


def _one_each(name: str, values: Tensor, num: int) -> Tensor:
    """`values` as [B]."""
    if tuple(values.shape) not in ((num,), (num, 1)):
        raise RequestError.for_field(f"{name}.shape", list(values.shape), f"[{num}] or [{num}, 1]")
    return values.reshape(num)
