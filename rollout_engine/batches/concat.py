"""Concatenation of rollouts, so that a trainer steps on all of them."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.batches.layout import (
    FILL_OF_TEACHER,
    PER_TURN,
    SPANS,
    TEACHER,
    Key,
    Span,
    check_batch,
    is_packed,
    leaves,
    packed_span,
    padding_token,
    span_of,
    width_of,
)
from rollout_engine.batches.sampled_columns import FILL
from rollout_engine.batches.summary import RolloutBatch, with_note

GroupIds = Literal["renumber", "keep"]

_FILL: dict[Key, float] = {
    **FILL,
    **dict.fromkeys(("policy_version", "kv_min_version", ("masks", "turn"), "routed_experts"), -1),
}
_TOP_K: tuple[Key, ...] = ("top_k", "ids"), ("top_k", "log_probs")
_TOKENS: tuple[Key, ...] = tuple(("tokens", span) for span in SPANS)
"""Padding values by key; other keys are padded with 0 or False, tokens with the batch's own padding."""


def concat(batches: Iterable[TensorDictBase], *, group_ids: GroupIds = "renumber") -> RolloutBatch:
    """Concatenate rollouts of one layout; sequences keep their order.

    In the padded layout every key is padded to the longest: prompts on the left, the others on the right. In the packed
    layout rows and cu_seqlens are joined.

    Args:
        batches: results of `RolloutPolicy.rollout` and `arollout`, or parts of them; keys may have been added.
        group_ids: "renumber" numbers groups 0, 1, 2, ... in order of appearance; groups of different batches stay
            different. "keep" leaves "group_id" unchanged: for parts of one rollout, whose groups may be split.

    Batches without "kept_logprob_mass" get 0 (log of 1: nothing was truncated), those without ("masks", "forced") or
    "pictures" none, and no "picture_features" either. The k of ("top_k", ...), and of teachers, becomes the largest,
    with -1 and -inf for tokens that others did not ask for. Any other key must be in all batches or in none. Raises
    `RequestError` otherwise, for mixed layouts, and for keys that cannot be concatenated.
    """
    if group_ids not in get_args(GroupIds):
        raise RequestError.for_field("group_ids", group_ids, "'renumber' or 'keep'")
    listed = [check_batch(batch, f"batches[{i}]") for i, batch in enumerate(batches)]
    if not listed:
        raise RequestError.for_field("batches", [], "at least one")
    if len({is_packed(batch) for batch in listed}) == 2:
        layouts = ["packed" if is_packed(batch) else "padded" for batch in listed]
        raise RequestError.for_field("layouts of the batches", layouts, "the same", "Choose it by rollout(layout=...).")
    parts = _complete([dict(leaves(batch)) for batch in listed])
    joined = _joined_packed(listed, parts) if is_packed(listed[0]) else _joined_padded(listed, parts)
    if group_ids == "renumber":
        joined["group_id"] = _renumber_groups([batch["group_id"] for batch in listed])
    size = [] if is_packed(listed[0]) else [len(joined["group_id"])]
    batch = RolloutBatch({}, batch_size=size, device=listed[0].device)
    for key, value in joined.items():
        batch[key] = value
    with_note(batch, listed)
    return batch


def _complete(parts: list[dict[Key, Any]]) -> list[dict[Key, Any]]:
    """Fill in keys that mean nothing if they are absent; raise `RequestError` for any other that some batches lack."""
    everything = {key: None for part in parts for key in part}
    for key in everything:
        without = [i for i, part in enumerate(parts) if key not in part]
        if key == "kept_logprob_mass":
            for part in parts:
                part.setdefault(key, torch.zeros_like(part["log_probs", "response"]))
        elif key == ("masks", "forced"):
            for part in parts:
                part.setdefault(key, torch.zeros_like(part["masks", "all_assistant_mask"]))
        elif key == "pictures" or (key == "picture_features" and not any(_shows_pictures(parts[i]) for i in without)):
            for part in parts:
                part.setdefault(key, NonTensorStack(*(() for _ in part["group_id"])))
        elif _is_top_k(key) and not without:
            most = max(part[key].shape[-1] for part in parts)
            for part in parts:
                part[key] = torch.nn.functional.pad(part[key], [0, most - part[key].shape[-1]], value=_fill_of(key))
        elif without:
            have = next(i for i, part in enumerate(parts) if key in part)
            hint = f"Add it to batches[{without[0]}], or leave it out of all with batch.exclude({key!r})."
            raise RequestError.for_field(f"batches[{without[0]}][{key!r}]", None, f"there, as in batches[{have}]", hint)
    return parts


def _shows_pictures(part: dict[Key, Any]) -> bool:
    return "pictures" in part and any(part["pictures"].tolist())


def _joined_padded(batches: list[TensorDictBase], parts: list[dict[Key, Any]]) -> dict[Key, Any]:
    pad_token_id = next((pad for pad in map(padding_token, batches) if pad is not None), 0)
    joined = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if key == PER_TURN:
            values = _same_turns(values)
        elif len({value.shape[1:] for value in values}) > 1:
            span = span_of(key) or _guessed_span(key, values, batches)
            width = max(width_of(batch, span) for batch in batches)
            fill = pad_token_id if key in _TOKENS else _fill_of(key)
            values = [_widen(value, width, fill, left=span == "prompt") for value in values]
        joined[key] = torch.cat(values, 0)
    return joined


def _joined_packed(batches: list[TensorDictBase], parts: list[dict[Key, Any]]) -> dict[Key, Any]:
    ends = [part.pop("cu_seqlens") for part in parts]
    joined = {}
    for key in parts[0]:
        per_token = {packed_span(key, part[key], batch) is not None for part, batch in zip(parts, batches, strict=True)}
        values = [part[key] for part in parts]
        if key == PER_TURN:
            values = _same_turns(values)
        joined[key] = torch.cat(values, 1 if per_token == {True} else 0)
    joined["cu_seqlens"] = torch.cat([ends[0][:1], torch.cat([end.diff() for end in ends]).cumsum(0).to(ends[0])])
    return joined


def _is_top_k(key: Key) -> bool:
    """Whether a key has some of the most likely tokens for each token."""
    return key in _TOP_K or (key[0] == TEACHER and key[-1] in ("top_ids", "top_log_probs"))


def _fill_of(key: Key) -> float:
    """The padding of a key other than tokens."""
    return FILL_OF_TEACHER.get(key[-1], 0) if key[0] == TEACHER else _FILL.get(key, 0)


def _guessed_span(key: Key, values: list[Tensor], batches: list[TensorDictBase]) -> Span:
    """The span of a key that users added, by its width."""
    pairs = list(zip(values, batches, strict=True))
    fits = [span for span in SPANS if all(v.dim() > 1 and v.shape[1] == width_of(b, span) for v, b in pairs)]
    if len(fits) != 1:
        shapes = [list(value.shape) for value in values]
        hint = f"Give it the same shape beyond the first dimension in all, or leave it out: batch.exclude({key!r})."
        raise RequestError.for_field(f"shapes of {key!r}", shapes, "as wide as the prompts, responses or full", hint)
    return fits[0]


def _same_turns(values: list[Tensor]) -> list[Tensor]:
    """Rewards of turns, padded to the most turns of all."""
    most = max(value.shape[1] for value in values)
    return [_widen(value, most, 0, left=False) for value in values]


def _widen(value: Tensor, width: int, fill: float, *, left: bool) -> Tensor:
    missing = width - value.shape[1]
    sides = [missing, 0] if left else [0, missing]
    return torch.nn.functional.pad(value, [0, 0] * (value.dim() - 2) + sides, value=fill)


def _renumber_groups(group_ids: list[Tensor]) -> Tensor:
    """Group ids 0, 1, 2, ... in order of appearance."""
    numbers: dict[tuple[int, int], int] = {}
    pairs = [(i, group) for i, ids in enumerate(group_ids) for group in ids.tolist()]
    return group_ids[0].new_tensor([numbers.setdefault(pair, len(numbers)) for pair in pairs])
