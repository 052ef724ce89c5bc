"""Advantages: how much better a completion, or a token of it, was than expected.

    batch = policy.rollout(prompts, params, num_samples=8, reward_fn=reward)
    advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])   # [B, 1], one per sample
    advantage, target = advantages.gae(rewards, values, batch["masks", "all_assistant_mask"])  # [B, T]
    advantage = advantages.reverse_kl(batch["log_probs", "full"], batch["teacher", "big", "log_probs"], mask)  # [B, T]

Results carry no gradient. `grpo` and `rloo` compare the samples of a prompt: call them on whole rollouts, before
`minibatches` splits groups. Their statistics are of episodes: one that has several rows (on_rewrite="branch") counts
once, and one that failed does not count. `batch["group_id"]` of a `RolloutBatch` brings both along; with a plain
TensorDict, or group ids of your own, give `episode_ids` and `mask`.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.provenance import episodes_note
from rollout_engine.batches.layout import check_batch, is_packed, num_sequences, one_per_sequence

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


@torch.no_grad()
def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: bool = True,
    episode_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Reward minus its group's mean, divided by the group's standard deviation; shape and order of `rewards`.

    A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with G - 1 in the denominator (DeepSeekMath, Shao et al., 2024, section
    4.1.2). `scale=False` omits the division: Dr. GRPO (Liu et al., 2025), so hard and easy prompts do not weigh more
    than others. A group of equal rewards gets exactly 0, and so does a sample that is alone in its group.

    Args:
        rewards: [B] or [B, 1], finite, the same in all rows of an episode.
        group_ids: [B], equal for samples of one prompt; groups may differ in size and lie in any order.
        episode_ids: [B], equal for rows of one episode of a group, each of which gets the episode's advantage. None:
            those of the batch that `group_ids` was read from as `batch["group_id"]`, else each row is an episode.
        mask: [B] or [B, 1] bool, the rows that count; the others get 0, and are in no mean and deviation. None: all but
            those of failed episodes (`batch["error"]`) of that batch, else all.

    Raises `RequestError` for other shapes, for rewards that are not finite or differ within an episode, and if no group
    has two episodes.
    """

    def relative(group: Tensor) -> Tensor:
        centred = group - group.mean(1, keepdim=True)
        return centred / (group.std(1, keepdim=True) + EPSILON) if scale and group.shape[1] > 1 else centred

    return _by_group(rewards, group_ids, episode_ids, mask, relative)


@torch.no_grad()
def rloo(
    rewards: Tensor, group_ids: Tensor, *, episode_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Reward minus the mean of the *other* samples of its group; shape and order of `rewards`.

    A_i = r_i - sum_{j != i} r_j / (G - 1) (REINFORCE leave-one-out: Kool et al., 2019; Ahmadian et al., 2024, section
    3.2): an unbiased baseline, independent of the sample. A sample that is alone in its group gets 0. Arguments and
    errors as for `grpo`.
    """

    def relative(group: Tensor) -> Tensor:
        others = group.shape[1] - 1
        return group - (group.sum(1, keepdim=True) - group) / others if others else torch.zeros_like(group)

    return _by_group(rewards, group_ids, episode_ids, mask, relative)


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
    """Generalized advantage estimates, and targets for the critic: [B, T] each, 0 at tokens that were not sampled.

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


@torch.no_grad()
def reverse_kl(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    coefficient: float = 1.0,
    discount: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """How much likelier a teacher finds each sampled token than the policy: [B, T], 0 at tokens that were not sampled.

    A_t = coefficient sum_{s >= t} discount^{s - t} (log q(x_s) - log p(x_s)), with x ~ p, the policy, and q the
    teacher. Of one token, log p - log q is an unbiased estimate of the reverse KL, KL(p || q): a policy gradient with
    these advantages lowers it (Agarwal et al., 2024, "On-Policy Distillation of Language Models"; with discount 0, each
    token alone, as in "On-Policy Distillation", Thinking Machines Lab, 2025). Add it to other advantages of tokens
    (`per_token(batch, grpo(...))`) for a reward with a penalty, with a reference policy as the teacher.

    Args:
        logprobs: [B, T], of the sampled tokens under the policy: batch["log_probs", "full"].
        teacher_logprobs: the same under the teacher: batch["teacher", NAME, "log_probs"].
        mask: [B, T] bool, the sampled tokens: batch["masks", "all_assistant_mask"].
        coefficient: factor of all.
        discount: weight of the next token's difference, in [0, 1]; 0: its own alone counts.
        cu_seqlens: [B + 1], of a packed batch, whose arguments and results are [1, N]. With a discount any [1, N] needs
            it, as it may be packed: torch.tensor([0, N]) for one sequence.

    Raises `RequestError` for shapes that do not fit, for one row with a discount and without `cu_seqlens`, and for
    log-probs of a sampled token that are not finite, as those of a teacher that failed.
    """
    rows = None if cu_seqlens is None else _UnpackedRows(cu_seqlens, logprobs)
    if rows is not None:
        logprobs, teacher_logprobs, mask = (rows.unpack(each) for each in (logprobs, teacher_logprobs, mask))
    _check_values(logprobs, mask)
    if teacher_logprobs.shape != logprobs.shape:
        bound = f"{list(logprobs.shape)}, as logprobs"
        raise RequestError.for_field("teacher_logprobs.shape", list(teacher_logprobs.shape), bound)
    if not 0 <= discount <= 1:
        raise RequestError.for_field("discount", discount, "in [0, 1]")
    if rows is None and discount and len(logprobs) == 1:
        hint = f"One row may be packed: batch['cu_seqlens'], or torch.tensor([0, {logprobs.shape[1]}]) of one sequence."
        raise RequestError.for_field("cu_seqlens", None, "given for one row with a discount", hint)
    difference = (teacher_logprobs - logprobs).where(mask, 0.0)
    if not difference.isfinite().all():
        row, column = (~difference.isfinite()).nonzero()[0].tolist()
        shown = f"{teacher_logprobs[row, column].item()} at [{row}, {column}]"
        hint = "A teacher that failed has NaN: leave the batch out, or Teacher(on_failure='raise')."
        raise RequestError.for_field("teacher_logprobs", shown, "finite for every sampled token", hint)
    if discount:
        following = torch.zeros_like(difference[:, 0])
        for t in reversed(range(difference.shape[1])):
            here = mask[:, t]
            following = torch.where(here, difference[:, t] + discount * following, following)
            difference[:, t] = torch.where(here, following, 0.0)
    difference *= coefficient
    return difference if rows is None else rows.pack(difference)


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


def _by_group(
    rewards: Tensor,
    group_ids: Tensor,
    episode_ids: Tensor | None,
    mask: Tensor | None,
    relative: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply `relative` to the rewards of all groups of one size, [number of groups, size], for every size.

    A group's rewards are those of its episodes that count; the results are spread to the episodes' rows.
    """
    flat = _checked_rewards(rewards, group_ids)
    is_counted = _select_counted(mask, group_ids).to(flat.device)
    episode = _episode_of_row(episode_ids, group_ids).to(flat.device)
    group_ids = group_ids.to(flat.device)
    _, sizes = group_ids[_first_rows(episode)].unique(return_counts=True)
    if len(group_ids) and int(sizes.max()) == 1:
        hint = "Ask for more samples of each prompt: rollout(num_samples=8)."
        raise RequestError.for_field("samples per group", 1, "at least 2, to be compared", hint)
    counted = is_counted.nonzero().squeeze(1)
    rows = counted[_first_rows(episode[counted])]  # one of each episode that counts
    reward_of_episode = torch.zeros_like(flat).index_put((episode[rows],), flat[rows])
    if (differs := counted[reward_of_episode[episode[counted]] != flat[counted]]).numel():
        hint = "To count each row for itself, give episode_ids=torch.arange(len(rewards))."
        bound = f"{reward_of_episode[episode[differs[0]]].item()}, as in another row of its episode"
        raise RequestError.for_field(f"rewards[{int(differs[0])}]", flat[differs[0]].item(), bound, hint)
    of_episode = torch.zeros_like(flat)
    _, number, sizes = group_ids[rows].unique(return_inverse=True, return_counts=True)
    order, starts = number.argsort(stable=True), sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        members = rows[order[starts[sizes == size][:, None] + torch.arange(size, device=rows.device)]]
        of_episode[episode[members]] = _relative(flat[members], relative)
    return torch.where(is_counted, of_episode[episode], 0).view_as(rewards)


def _relative(groups: Tensor, relative: Callable[[Tensor], Tensor]) -> Tensor:
    """`relative(groups)`, exactly 0 for groups of equal rewards. Raises `RequestError` for sums that overflow."""
    found = torch.where((groups == groups[:, :1]).all(1, keepdim=True), 0, relative(groups))
    if groups.shape[1] > 1 and not (found.isfinite().all() and groups.std(1).isfinite().all()):
        bound = f"small enough for their sums of squares to be finite in {groups.dtype}"
        raise RequestError.for_field("rewards", groups.abs().max().item(), bound, "Give rewards.double().")
    return found


def _checked_rewards(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The rewards as a floating-point [B]. Raises `RequestError`."""
    for name, given in (("rewards", rewards), ("group_ids", group_ids)):
        if not isinstance(given, Tensor):
            raise RequestError.for_field(name, type(given).__name__, "a tensor", "Give torch.tensor(...).")
    if group_ids.dim() != 1:
        raise RequestError.for_field("group_ids.shape", list(group_ids.shape), "[B]")
    floating = rewards if rewards.is_floating_point() else rewards.float()
    flat = one_per_sequence("rewards", floating, len(group_ids))
    if not flat.isfinite().all():
        row = int((~flat.isfinite()).nonzero()[0])
        raise RequestError.for_field(f"rewards[{row}]", flat[row].item(), "a finite number")
    return flat


def _select_counted(mask: Tensor | None, group_ids: Tensor) -> Tensor:
    """bool [B]: the mask as given, or else all but the rows of failed episodes."""
    if mask is None:
        note = episodes_note(group_ids)
        counted = [True] * len(group_ids) if note is None else list(note.is_counted)
        return torch.tensor(counted, dtype=torch.bool, device=group_ids.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise RequestError.for_field("mask", given, "a tensor of torch.bool")
    return one_per_sequence("mask", mask, len(group_ids))


def _episode_of_row(episode_ids: Tensor | None, group_ids: Tensor) -> Tensor:
    """int64 [B]: the number of each row's episode, different for episodes of different groups."""
    if episode_ids is None:
        note = episodes_note(group_ids)
        if note is None:
            return torch.arange(len(group_ids), device=group_ids.device)
        episode_ids = torch.tensor(note.episode_ids)
    if not isinstance(episode_ids, Tensor):
        raise RequestError.for_field("episode_ids", type(episode_ids).__name__, "a tensor", "Give torch.tensor(...).")
    each = one_per_sequence("episode_ids", episode_ids, len(group_ids))
    (_, group), (_, episode) = group_ids.unique(return_inverse=True), each.unique(return_inverse=True)
    _, number = torch.stack([group, episode.to(group)], 1).unique(dim=0, return_inverse=True)
    return torch.as_tensor(number)


def _first_rows(episode: Tensor) -> Tensor:
    """One row of each episode."""
    _, number = episode.unique(return_inverse=True)
    num = int(number.max()) + 1 if len(number) else 0
    rows = torch.arange(len(number), device=number.device)
    return rows.new_empty(num).index_put((number,), rows)


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
