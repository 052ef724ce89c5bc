"""Advantages: how much better a completion, or a token of it, was than expected.

    batch = policy.rollout(prompts, params, num_samples=8, reward_fn=reward)
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])   # [B, 1], one per sample
    advantage, target = advantages.gae(rewards, values, batch["masks", "all_assistant_mask"])  # [B, T]

Results carry no gradient. `grpo` and `rloo` compare the samples of a prompt: call them on whole rollouts, before
`minibatches` splits groups.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.batches.layout import check_batch, is_packed, num_sequences, one_per_sequence
from rollout_engine.errors import RequestError

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


@torch.no_grad()
def grpo(rewards: Tensor, group_ids: Tensor, *, scale: bool = True) -> Tensor:
    """Reward minus its group's mean, divided by the group's standard deviation; shape and order of `rewards`.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with G - 1 in the denominator (DeepSeekMath, Shao et al., 2024, section
    4.1.2). `scale=False` omits the division: Dr. GRPO (Liu et al., 2025), where hard and easy prompts do not weigh more
    than others. A group of equal rewards gets 0, and so does a sample that is alone in its group.

    Args:
        rewards: [B] or [B, 1], finite.
        group_ids: [B], equal for samples of one prompt; groups may differ in size and lie in any order.

    Raises `RequestError` for other shapes, for rewards that are not finite, and if no group has two samples.
    """

    def relative(group: Tensor) -> Tensor:
        centred = group - group.mean(1, keepdim=True)
        return centred / (group.std(1, keepdim=True) + EPSILON) if scale and group.shape[1] > 1 else centred

    return _by_group(rewards, group_ids, relative)


@torch.no_grad()
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of the *other* samples of its group; shape and order of `rewards`.

    A_i = r_i - sum_{j != i} r_j / (G - 1) (REINFORCE leave-one-out: Kool et al., 2019; Ahmadian et al., 2024, section
    3.2): an unbiased baseline, independent of the sample. A sample that is alone in its group gets 0. Arguments and
    errors as for `grpo`.
    """

    def relative(group: Tensor) -> Tensor:
        others = group.shape[1] - 1
        return group - (group.sum(1, keepdim=True) - group) / others if others else torch.zeros_like(group)

    return _by_group(rewards, group_ids, relative)


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
    """Generalized advantage estimates, and targets for the critic: [B, T] each, 0 where no token was sampled.

    d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  target_t = A_t + V_t  (Schulman et al., 2016,
    equations 11 and 16). The steps t of a sequence are its sampled tokens; other tokens between them are skipped. After
    the last one A is 0, and V is 0 unless the sequence was truncated.

    Args:
        rewards: [B] or [B, 1], paid at the last sampled token; or [B, T], paid at each.
        values: [B, T], the critic's value before each token.
        mask: [B, T] bool, the sampled tokens. A padded batch's all_assistant_mask, or the columns of it (`[:, 1:]`)
            that `values` has.
        truncated: [B] or [B, 1] bool, sequences that were cut off, so that V after their last token is that of
            `final_values`, not 0. Give both or neither (then all sequences count as ended).
        final_values: [B] or [B, 1], the critic's value after the last sampled token; read where `truncated`.
        cu_seqlens: [B + 1], of a packed batch, whose rewards per token, values, mask and results are [1, N].
        gamma: discount per token.
        lam: weight of later steps: 0 uses the critic alone, 1 the rewards alone.

    Raises `RequestError` for shapes that do not fit.
    """
    if cu_seqlens is not None:
        rows = _UnpackedRows(cu_seqlens, values)
        paid_each = rows.unpack(rewards) if rewards.shape == values.shape else rewards
        ends = dict(truncated=truncated, final_values=final_values)
        both = gae(paid_each, rows.unpack(values), rows.unpack(mask), **ends, gamma=gamma, lam=lam)
        return rows.pack(both[0]), rows.pack(both[1])
    num, width = _check_values(values, mask)
    if (truncated is None) != (final_values is None):
        given = {"truncated": truncated is not None, "final_values": final_values is not None}
        raise RequestError.for_field("arguments given", given, "both or neither")
    value_after = torch.zeros_like(values[:, :1]).squeeze(1)
    if truncated is not None and final_values is not None:
        ahead = one_per_sequence("final_values", final_values, num).to(values)
        value_after = torch.where(one_per_sequence("truncated", truncated, num).bool(), ahead, value_after)
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
    """Repeat one value per sequence, [B] or [B, 1], for each of its tokens; the shape of ("tokens", "full")."""
    num = num_sequences(check_batch(batch))
    each = one_per_sequence("advantages", advantages, num)
    if is_packed(batch):
        return each.repeat_interleave(batch["cu_seqlens"].diff())[None]
    return each[:, None].expand(batch["tokens", "full"].shape)


class _UnpackedRows:
    """Converts packed rows [1, N] to one sequence per row, and back."""

    def __init__(self, cu_seqlens: Tensor, values: Tensor) -> None:
        num_tokens = int(cu_seqlens[-1])
        if tuple(values.shape) != (1, num_tokens):
            hint = "Give the values of all tokens, the first of each sequence included."
            raise RequestError.for_field("values.shape", list(values.shape), f"[1, {num_tokens}], by cu_seqlens", hint)
        lengths = cu_seqlens.diff()
        self._shape = len(lengths), int(lengths.max())
        self._row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        self._column = torch.arange(num_tokens, device=lengths.device) - cu_seqlens[:-1].repeat_interleave(lengths)

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, N] -> [B, T], zeros after each sequence."""
        return packed.new_zeros(self._shape).index_put((self._row, self._column), packed[0])

    def pack(self, rows: Tensor) -> Tensor:
        """[B, T] -> [1, N]."""
        return rows[self._row, self._column][None]


def _by_group(rewards: Tensor, group_ids: Tensor, relative: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `relative` to the rewards of all groups of one size, [number of groups, size], for every size."""
    for name, given in (("rewards", rewards), ("group_ids", group_ids)):
        if not isinstance(given, Tensor):
            raise RequestError.for_field(name, type(given).__name__, "a tensor", "Give torch.tensor(...).")
    if group_ids.dim() != 1:
        raise RequestError.for_field("group_ids.shape", list(group_ids.shape), "[B]")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    flat = one_per_sequence("rewards", rewards, len(group_ids))
    if not flat.isfinite().all():
        row = int((~flat.isfinite()).nonzero()[0])
        raise RequestError.for_field(f"rewards[{row}]", flat[row].item(), "a finite number")
    _, number, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    if len(group_ids) and int(sizes.max()) == 1:
        hint = "Ask for more samples of each prompt: rollout(num_samples=8)."
        raise RequestError.for_field("samples per group", 1, "at least 2, to be compared", hint)
    advantages = torch.zeros_like(flat)
    order, starts = number.argsort(stable=True), sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        rows = order[starts[sizes == size][:, None] + torch.arange(size, device=group_ids.device)]
        advantages[rows] = relative(flat[rows])
    return advantages.view_as(rewards)


def _check_values(values: Tensor, mask: Tensor) -> tuple[int, int]:
    if values.dim() != 2:
        raise RequestError.for_field("values.shape", list(values.shape), "[B, T]")
    if mask.shape != values.shape or mask.dtype != torch.bool:
        raise RequestError.for_field("mask", f"{mask.dtype} {list(mask.shape)}", f"torch.bool {list(values.shape)}")
    return values.shape[0], values.shape[1]


def _per_step(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards per token [B, T]: as given, or at the last True of each row of `mask`."""
    if rewards.shape == mask.shape and rewards.shape[1] != 1:
        return rewards
    last = mask.long().cumsum(1).argmax(1)  # the first column with the row's full count
    paid = torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
    return paid.scatter(1, last[:, None], one_per_sequence("rewards", rewards, len(mask))[:, None])
