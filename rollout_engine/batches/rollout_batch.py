"""Conversion of outputs to the TensorDict that trainers read, and the definition of its keys.

B sequences, group-major; P, R, T: longest prompt, response, prompt + response; N tokens in all.

    key                                       padded   packed
    ("tokens", "prompt")                      [B, P]   [1, sum P]   int64; padded on the left
    ("tokens", "response")                    [B, R]   [1, sum R]   int64; sampled ids, end token included
    ("tokens", "full")                        [B, T]   [1, N]       int64
    ("masks", "all_attention_mask")           [B, T]   [1, N]       bool; real tokens of full
    ("masks", "all_assistant_mask")           [B, T]   [1, N]       bool; tokens the policy sampled
    ("masks", "forced")                       [B, T]   [1, N]       bool; tokens that `thinking_budget` forced, which
                                                                    are outside the assistant mask; only with a budget
    ("masks", "prompt")                       [B, P]   [1, sum P]   bool; real tokens of prompt
    ("masks", "response")                     [B, R]   [1, sum R]   bool; real tokens of response
    ("log_probs", "response"), ("…", "full")  [B, R], [B, T] …      float32; the policy's, 0 of tokens that are neither
                                                                    sampled nor forced
    "kept_logprob_mass"                       [B, R]   [1, sum R]   float32; only if top-k, top-p or min-p cut;
                                                                    0 of forced tokens
    "policy_version", "kv_min_version"        [B, T]   [1, N]       int64; likewise, -1 of the others
    "routed_experts"                          [B, T, L, k]          int16; experts of each token in the L layers with a
                                                       [1, N, L, k] router, -1 if it was not computed: the last of a
                                                                    sequence; only with return_routed_experts
    ("entropy", "full")                       [B, T]   [1, N]       float32, nats; of sampled and forced tokens, as
                                                                    log_probs; 0 of others; only with entropy
    ("top_k", "ids")                          [B, T, k]             int64; the k most likely tokens, most likely first;
                                                       [1, N, k]    likewise, -1 of others; only with logprobs=k, k >= 1
    ("top_k", "log_probs")                    [B, T, k] …           float32; theirs; -inf of others
    "hidden_states"                           [B, T, H]             in the model's dtype (here float32): the state from
                                                       [1, N, H]    which each token was drawn, that of the token before
                                                                    it; 0 of others. return_hidden_states="all":
                                                                    of prompt tokens too, 0 for the first
    "group_id", "sample_index", "seed"        [B]                   int64
    "num_prompt_tokens"                       [B]                   int64; the start of the response in full
    "num_dropped"                             [B]                   int64; samples of its group that were started and
                                                                    dropped; only with oversample
    "truncated"                               [B, 1]                bool; cut off, by max_tokens or an abort
    "finish_reason", ("text", "prompt"), ("text", "response"), columns   [B]   one Python object per sequence
    "pictures"                                [B]                   tuple of `PlacedPicture`, at positions of the
                                                                    sequence's tokens in full; only if any has pictures
    "support"                                 [B]                   `Support` of the tokens of the response; only with
                                                                    return_support
    "picture_features"                        [B]                   tuple of `EncodedPicture`, in the order of pictures;
                                                                    only with `RolloutPolicy.add_picture_features`
    ("next", "reward"), ("next", "done")      [B, 1]                float32, bool; only with rewards. done: the sample
                                                                    was not cut off (finish_reason "stop")
    ("rewards", NAME)                         [B, 1]                float32, of each function if there is a list of
                                                                    them; NaN if it does not apply
    ("masks", "turn")                         [B, T]   [1, N]       int64; only of episodes
    ("teacher", NAME, "log_probs")            [B, T]   [1, N]       float32; a teacher's, of the tokens that have the
                                                                    policy's; 0 of the others; NaN if it failed
    ("teacher", NAME, "top_ids")              [B, T, k]             int64; with teacher_top_k: the teacher's most likely
                                                       [1, N, k]    tokens, or the policy's; -1 outside the mask
    ("teacher", NAME, "top_log_probs")        [B, T, k]             float32; the teacher's log-probs of these; -inf
                                                       [1, N, k]    outside the mask
    "cu_seqlens"                                       [B + 1]      int32; the start of each sequence in full

Padding is `pad_token_id` for tokens. The padded layout has batch size [B], the packed one [].
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from tensordict import NonTensorStack
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput, VersionSpan
from rollout_engine.base.support import support_of
from rollout_engine.batches.sampled_columns import FILL, hidden_states, sampled_columns
from rollout_engine.batches.summary import RolloutBatch

Layout = Literal["padded", "packed"]


def rollout_batch(
    outputs: Sequence[RequestOutput],
    *,
    pad_token_id: int,
    group_ids: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
    function_rewards: Mapping[str, Sequence[Sequence[float | None]]] | None = None,
    oversampled: bool = False,
    turns: Sequence[np.ndarray] | None = None,
    layout: Layout = "padded",
) -> RolloutBatch:
    """Build one TensorDict from finished outputs, with the keys of the table above.

    Args:
        outputs: one per prompt, with log-probs; every sample becomes a sequence.
        pad_token_id: padding of the tokens.
        group_ids: one per prompt; default 0, 1, 2, ...
        columns: name -> one value per prompt, repeated for its samples.
        rewards: per prompt, one number per sample.
        function_rewards: name -> the same for one reward function; None if it does not apply.
        oversampled: add "num_dropped".
        turns: per sequence int64 [response]: turn of a sampled token, -1 of any other (log-prob 0, version -1).
        layout: "padded", or "packed" (all sequences end to end in one row, without padding).

    `SamplingParams(seed=int(batch["seed"][row]), n=1)` replays a sequence. Seeds have 64 bits, so int64 holds the upper
    half as negative numbers, which `SamplingParams` accepts.
    Raises `RequestError` for an unknown layout and for outputs without log-probs.
    """
    check_layout(layout)
    samples = [sample for output in outputs for sample in output.outputs]
    rows = _repeat_values(range(len(outputs)), outputs)
    prompts = _repeat_values([np.array(output.prompt_token_ids, np.int64) for output in outputs], outputs)
    responses = [np.array(sample.token_ids, np.int64) for sample in samples]
    num_prompt, num_response = (np.array([*map(len, parts)], np.int64) for parts in (prompts, responses))
    masks = _masks(num_prompt, num_response, layout, turns, _join_forced(samples))

    keys = _token_keys(prompts, responses, samples, masks, pad_token_id) | _state_keys(outputs, masks)
    batch = RolloutBatch(keys, batch_size=[len(samples)] if layout == "padded" else [])
    batch["group_id"] = _tensor(np.array(range(len(outputs)) if group_ids is None else group_ids, np.int64)[rows])
    batch["sample_index"] = _tensor(np.array([sample.index for sample in samples], np.int64))
    batch["seed"] = _tensor(np.array([sample.seed for sample in samples], np.uint64).view(np.int64))
    batch["num_prompt_tokens"] = _tensor(num_prompt)
    if oversampled:
        batch["num_dropped"] = torch.tensor([outputs[row].num_dropped for row in rows], dtype=torch.int64)
    batch["truncated"] = ~(done := _make_done(samples))
    batch["finish_reason"] = NonTensorStack(*(sample.finish_reason for sample in samples))
    batch["text", "prompt"] = NonTensorStack(*(outputs[row].prompt for row in rows))
    batch["text", "response"] = NonTensorStack(*(sample.text for sample in samples))
    for name, values in [*(columns or {}).items(), *_picture_column(outputs)]:
        batch[name] = NonTensorStack(*(values[row] for row in rows))
    if rewards is not None:
        batch["next", "reward"] = torch.tensor([*itertools.chain(*rewards)], dtype=torch.float32).unsqueeze(-1)
        batch["next", "done"] = done
    for name, each in (function_rewards or {}).items():
        batch["rewards", name] = _nan_for_none(itertools.chain(*each))
    if layout == "packed":
        batch["cu_seqlens"] = _tensor(np.cumsum([0, *(num_prompt + num_response)], dtype=np.int32))
    return batch


def _picture_column(outputs: Sequence[RequestOutput]) -> Iterable[tuple[str, list[Any]]]:
    """The column of pictures with its name, if any prompt has some."""
    if any(output.pictures for output in outputs):
        yield "pictures", [tuple(output.pictures) for output in outputs]


def check_layout(layout: str) -> None:
    """Raise `RequestError` for an unknown layout."""
    if layout not in get_args(Layout):
        raise RequestError.for_field("layout", layout, " or ".join(map(repr, get_args(Layout))))


class _Masks(NamedTuple):
    """bool masks in the shape of the layout; their True places, row by row, are in the order of the tokens."""

    prompt: np.ndarray
    response: np.ndarray
    full: np.ndarray
    after: np.ndarray
    """The response, within full."""
    assistant: np.ndarray
    turn: np.ndarray | None = None
    """int64, not bool: the turn of each token of full, -1 of tokens of none."""
    forced: np.ndarray | None = None
    """None without a budget of thinking."""


def _masks(
    num_prompt: np.ndarray,
    num_response: np.ndarray,
    layout: Layout,
    turns: Sequence[np.ndarray] | None,
    forced: np.ndarray | None,
) -> _Masks:
    """`forced`: bool, all responses end to end."""
    masks = _spans(num_prompt, num_response, layout)
    if turns is not None:
        turn = np.full(masks.after.shape, -1)
        turn[masks.after] = _join_parts(list(turns), np.int64)
        masks = masks._replace(assistant=turn >= 0, turn=turn)
    if forced is not None:
        placed = np.zeros_like(masks.after)
        placed[masks.after] = forced
        masks = masks._replace(assistant=masks.assistant & ~placed, forced=placed)
    return masks


def _join_forced(samples: list[CompletionOutput]) -> np.ndarray | None:
    """Which response tokens are forced, bool, all samples end to end; None if none has a budget."""
    if all(sample.forced is None for sample in samples):
        return None
    parts = [np.zeros(len(each.token_ids), bool) if each.forced is None else each.forced for each in samples]
    return _join_parts(parts, np.bool_)


def _spans(num_prompt: np.ndarray, num_response: np.ndarray, layout: Layout) -> _Masks:
    if layout == "packed":
        lengths = np.stack([num_prompt, num_response], axis=1).reshape(-1)
        after = np.repeat(np.tile([False, True], len(num_prompt)), lengths)[None]
        prompt, response, full = (np.ones((1, int(n.sum())), bool) for n in (num_prompt, num_response, lengths))
        return _Masks(prompt, response, full, after, after)
    p, r = num_prompt[:, None], num_response[:, None]
    width = int(num_prompt.max(initial=0))
    at = np.arange(int((num_prompt + num_response).max(initial=0)))
    response = at[: int(num_response.max(initial=0))] < r
    after = (at >= p) & (at < p + r)
    return _Masks(np.arange(width) >= width - p, response, at < p + r, after, after)


def _token_keys(
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    samples: list[CompletionOutput],
    masks: _Masks,
    pad_token_id: int,
) -> dict[str, Any]:
    full = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    logprobs = _join_parts([_logprobs(sample) for sample in samples], np.float32)
    policy_version, kv_min_version = _versions(samples)
    keys: dict[str, Any] = {
        "tokens": {
            "prompt": _place_values(masks.prompt, _join_parts(prompts, np.int64), pad_token_id),
            "response": _place_values(masks.response, _join_parts(responses, np.int64), pad_token_id),
            "full": _place_values(masks.full, _join_parts(full, np.int64), pad_token_id),
        },
        "masks": {
            "all_attention_mask": _tensor(masks.full),
            "all_assistant_mask": _tensor(masks.assistant),
            "prompt": _tensor(masks.prompt),
            "response": _tensor(masks.response),
        },
        "log_probs": {
            "response": _place_values(masks.response, logprobs, 0.0),
            "full": _place_values(masks.after, logprobs, 0.0),
        },
        "policy_version": _place_values(masks.after, policy_version, -1),
        "kv_min_version": _place_values(masks.after, kv_min_version, -1),
    }
    for name in ("turn", "forced"):
        if (mask := getattr(masks, name)) is not None:
            keys["masks"][name] = _tensor(mask)
    if any(sample.kept_logprob_mass is not None for sample in samples):
        kept = [_or_zeros(sample.kept_logprob_mass, sample) for sample in samples]
        keys["kept_logprob_mass"] = _place_values(masks.response, _join_parts(kept, np.float32), 0.0)
    if any(sample.routed_experts is not None for sample in samples):
        num_tokens = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        keys["routed_experts"] = _place_values(masks.full, _routed_experts(samples, num_tokens), -1)
    if any(sample.support is not None for sample in samples):
        keys["support"] = NonTensorStack(*map(support_of, samples))
    for key, values in sampled_columns(samples):
        place = keys if isinstance(key, str) else keys.setdefault(key[0], {})
        place[key if isinstance(key, str) else key[1]] = _place_values(masks.after, values, FILL[key])
    return keys


def _state_keys(outputs: Sequence[RequestOutput], masks: _Masks) -> dict[str, Any]:
    states = hidden_states(outputs)
    return {} if states is None else {"hidden_states": _place_values(masks.full, states, FILL["hidden_states"])}


def _logprobs(sample: CompletionOutput) -> np.ndarray:
    if sample.logprobs is None and sample.token_ids:
        raise RequestError.for_field("logprobs", None, "set for rollouts", "logprobs=0 is cheap.")
    return _or_zeros(sample.logprobs, sample)


def _routed_experts(samples: list[CompletionOutput], num_tokens: list[int]) -> np.ndarray:
    """int16 [sum of num_tokens, L, k], all sequences end to end, -1 if there are none."""
    shape = next(sample.routed_experts.shape[1:] for sample in samples if sample.routed_experts is not None)
    rows = np.full((sum(num_tokens), *shape), -1, np.int16)
    for sample, end, num in zip(samples, itertools.accumulate(num_tokens), num_tokens, strict=True):
        if sample.routed_experts is not None:
            rows[end - num : end - num + len(sample.routed_experts)] = sample.routed_experts
    return rows


def _or_zeros(values: np.ndarray | None, sample: CompletionOutput) -> np.ndarray:
    return np.zeros(len(sample.token_ids), np.float32) if values is None else values


def _versions(samples: list[CompletionOutput]) -> tuple[np.ndarray, np.ndarray]:
    """(policy_version, kv_min_version) of every sampled token, int64, all samples end to end."""
    spans: list[VersionSpan] = [span for sample in samples for span in sample.version_spans]
    lengths = [span.end - span.start for span in spans]
    assert sum(lengths) == sum(len(sample.token_ids) for sample in samples), "version spans do not tile the tokens"
    columns = np.array([(span.policy_version, span.kv_min_version) for span in spans], np.int64).reshape(-1, 2)
    policy_version, kv_min_version = np.repeat(columns, lengths, axis=0).T
    return policy_version, kv_min_version


def _make_done(samples: list[CompletionOutput]) -> Tensor:
    return torch.tensor([sample.finish_reason == "stop" for sample in samples], dtype=torch.bool).unsqueeze(-1)


def _nan_for_none(values: Iterable[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32).unsqueeze(-1)


def _repeat_values(values: Sequence[Any], outputs: Sequence[RequestOutput]) -> list[Any]:
    return [value for value, output in zip(values, outputs, strict=True) for _ in output.outputs]


def _join_parts(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts])


def _place_values(mask: np.ndarray, flat: np.ndarray, fill: float) -> Tensor:
    placed = np.full(mask.shape + flat.shape[1:], fill, flat.dtype)
    placed[mask] = flat
    return _tensor(placed)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
