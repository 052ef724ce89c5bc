"""Positions of sequences in a rollout's TensorDict, for both layouts of `rollout_engine.batches.rollout_batch`.

Every key with one value per token covers one of three spans:

    span         its tokens   padded: one row per sequence   packed: all sequences in one row
    "prompt"     prompt       [B, P], left-padded            [1, sum P], end to end
    "response"   response     [B, R], right-padded           [1, sum R], end to end
    "full"       both         [B, T], right-padded           [1, N], split at cu_seqlens
"""

from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rollout_engine.base.errors import RequestError

Span: TypeAlias = Literal["prompt", "response", "full"]
Key: TypeAlias = str | tuple[str, ...]
Place: TypeAlias = tuple[int, slice]
"""Row and columns of one sequence's tokens."""

SPANS: tuple[Span, ...] = ("prompt", "response", "full")
SPAN_OF_KEY: dict[Key, Span] = {
    ("tokens", "prompt"): "prompt",
    ("masks", "prompt"): "prompt",
    ("tokens", "response"): "response",
    ("masks", "response"): "response",
    ("log_probs", "response"): "response",
    "kept_logprob_mass": "response",
    ("tokens", "full"): "full",
    ("masks", "all_attention_mask"): "full",
    ("masks", "all_assistant_mask"): "full",
    ("masks", "turn"): "full",
    ("masks", "forced"): "full",
    ("log_probs", "full"): "full",
    "policy_version": "full",
    "kv_min_version": "full",
    "routed_experts": "full",
    ("entropy", "full"): "full",
    ("top_k", "ids"): "full",
    ("top_k", "log_probs"): "full",
    "hidden_states": "full",
}
"""Keys of a rollout with one value per token."""
TEACHER = "teacher"
"""First part of the keys of teachers, ("teacher", NAME, ...), which all have one value or row per token of full."""
FILL_OF_TEACHER = {"log_probs": 0.0, "top_ids": -1, "top_log_probs": float("-inf")}
"""Last part of the keys of teachers -> the value outside the assistant mask."""
PER_TURN: Key = ("rewards", "turn")
"""The key of episodes with one value per turn, [B, most turns] in both layouts, padded with 0 on the right."""

RESERVED_KEYS = frozenset(
    "tokens masks log_probs kept_logprob_mass policy_version kv_min_version group_id sample_index seed "
    "num_prompt_tokens num_dropped truncated finish_reason text next rewards cu_seqlens routed_experts "
    "pictures picture_features support entropy top_k hidden_states teacher".split()
)
"""Top-level keys that no column may take."""
EPISODE_KEYS = frozenset("num_turns episode_id seat ended_by error messages info".split())
"""Further top-level keys of episodes, one entry per row; `rollout_engine.rollouts.episodes.rows` defines them."""

_NEEDED = {"tokens", "masks", "num_prompt_tokens"}


class Places(NamedTuple):
    """Places of each sequence's tokens per span, in the order of the batch."""

    prompt: list[Place]
    response: list[Place]
    full: list[Place]


def is_packed(batch: TensorDictBase) -> bool:
    """Whether the layout is "packed"."""
    return "cu_seqlens" in batch.keys()


def num_sequences(batch: TensorDictBase) -> int:
    """Number of sequences, in either layout."""
    return len(batch["cu_seqlens"]) - 1 if is_packed(batch) else batch.batch_size[0]


def check_batch(
    batch: object, field: str = "batch", *, needed: Collection[str] = _NEEDED, otherwise: str = ""
) -> TensorDictBase:
    """Return `batch` if it is a rollout in one of the two layouts. Raises `RequestError`, naming it `field`.

    `needed`: required top-level keys; `otherwise`: the advice for anything but a TensorDict.
    """
    if not isinstance(batch, TensorDictBase):
        raise RequestError.for_field(field, batch, "a TensorDict as RolloutPolicy.rollout returns it", otherwise)
    if missing := set(needed) - set(batch.keys()):
        hint = "Keep all keys that RolloutPolicy.rollout returns."
        if missing == {"routed_experts"}:
            hint = "Roll out with SamplingParams(return_routed_experts=True), which returns them."
        raise RequestError.for_field(f"{field}.keys()", sorted(map(str, batch.keys())), f"with {sorted(missing)}", hint)
    if not is_packed(batch) and batch.batch_dims != 1:
        hint = "Give it before reshaping or stacking; one sequence alone is batch[i : i + 1]."
        raise RequestError.for_field(f"{field}.batch_size", list(batch.batch_size), "[number of sequences]", hint)
    return batch


def leaves(batch: TensorDictBase) -> Iterator[tuple[Key, Any]]:
    """(key, value) of all tensors and stacks of Python objects, at any depth."""
    for key in batch.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        parent = batch if isinstance(key, str) else batch.get(key[:-1])
        yield key, parent.get(key if isinstance(key, str) else key[-1])


def places(batch: TensorDictBase) -> Places:
    """Places of every sequence's tokens."""
    num_prompt = batch["num_prompt_tokens"]
    if is_packed(batch):
        num_response = batch["cu_seqlens"].long().diff() - num_prompt
        return Places(_end_to_end(num_prompt.tolist()), _end_to_end(num_response.tolist()), full_places(batch))
    width = width_of(batch, "prompt")
    prompts = [(row, slice(width - n, width)) for row, n in enumerate(num_prompt.tolist())]
    responses = [(row, slice(0, n)) for row, n in enumerate(batch["masks", "response"].sum(1).tolist())]
    return Places(prompts, responses, full_places(batch))


def full_places(batch: TensorDictBase) -> list[Place]:
    """Places of every sequence's prompt and response together."""
    if is_packed(batch):
        return _end_to_end(batch["cu_seqlens"].diff().tolist())
    return [(row, slice(0, n)) for row, n in enumerate(batch["masks", "all_attention_mask"].sum(1).tolist())]


def scored_mask(batch: TensorDictBase) -> Tensor:
    """The tokens with log-probs, bool in the shape of ("tokens", "full"): sampled, or forced by a budget."""
    masks = batch["masks"]
    sampled: Tensor = masks["all_assistant_mask"]
    return sampled | masks["forced"] if "forced" in masks.keys() else sampled


def width_of(batch: TensorDictBase, span: Span) -> int:
    """Columns of keys with this span: P, R or T when padded, the sum over sequences when packed."""
    return int(batch["tokens", span].shape[1])


def padding_token(batch: TensorDictBase) -> int | None:
    """Token id of the padding; None if nothing is padded."""
    for span, mask in (("prompt", "prompt"), ("response", "response"), ("full", "all_attention_mask")):
        padding = batch["tokens", span][~batch["masks", mask]]
        if len(padding):
            return int(padding[0])
    return None


def span_of(key: Key) -> Span | None:
    """The span of a rollout's own key with one value per token; None for other keys."""
    return "full" if isinstance(key, tuple) and key[0] == TEACHER else SPAN_OF_KEY.get(key)


def packed_span(key: Key, value: Any, batch: TensorDictBase) -> Span | None:
    """The span of `key` in a packed batch; None for keys with one entry per sequence.

    For keys that users added the shape decides: [1, n, ...] with n the tokens of a span, or [B, ...]. Raises
    `RequestError` for other shapes.
    """
    if key == PER_TURN:
        return None
    known = span_of(key)
    if known is not None:
        return known
    shape = tuple(value.shape)
    if isinstance(value, Tensor) and len(shape) > 1 and shape[0] == 1 < shape[1]:
        for span in SPANS:
            if shape[1] == width_of(batch, span):
                return span
    if shape[:1] == (num_sequences(batch),):
        return None
    tokens = ", ".join(f"[1, {width_of(batch, span)}, ...]" for span in SPANS)
    bound = f"one of {tokens} (prompt, response, full) or [{num_sequences(batch)}, ...]"
    raise RequestError.for_field(f"batch[{key!r}].shape", list(shape), bound, "Take it out with batch.exclude(key).")


def one_per_sequence(name: str, values: Tensor, num: int) -> Tensor:
    """`values` [num] or [num, 1] as [num]. Raises `RequestError` for other shapes."""
    if tuple(values.shape) not in ((num,), (num, 1)):
        raise RequestError.for_field(f"{name}.shape", list(values.shape), f"[{num}] or [{num}, 1]")
    return values.reshape(num)


def _end_to_end(lengths: list[int]) -> list[Place]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [(0, slice(start, end)) for start, end in zip(ends[:-1], ends[1:], strict=True)]
