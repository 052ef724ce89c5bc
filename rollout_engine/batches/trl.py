"""Conversion of rollouts for Hugging Face TRL: names, dtypes and padding sides of `GRPOTrainer` in trl 1.16."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture, join_arrays
from rollout_engine.batches.layout import check_batch, num_sequences, one_per_sequence, padding_token, places


def to_trl(batch: TensorDictBase, advantages: Tensor | None = None) -> dict[str, Any]:
    """Convert a rollout of either layout to the inputs of TRL's GRPO loss.

        key                                 shape, dtype
        prompt_ids, prompt_mask             [B, P] int64, padded on the left; a mask is 1 on tokens, 0 on padding
        completion_ids, completion_mask     [B, R] int64, padded on the right
        sampling_per_token_logps            [B, R] float32, of the policy that sampled; 0 on padding
        old_per_token_logps                 the same: engine and trainer agree bit for bit, so none is recomputed
        advantages                          [B] float32; if given, or if the batch has a key "advantage"
        num_items_in_batch                  [] int64, tokens that count in the loss
        tool_mask                           [B, R] int64, 0 on response tokens outside all_assistant_mask; only if
                                            there are any: of an environment, or forced by a budget
        pixel_values, image_grid_thw, ...   the pictures of all sequences in order, as the model's forward takes them;
                                            the next two as well only if there are any
        mm_token_type_ids                   [B, P + R] int64, 1 at the tokens that stand for a picture's features
        num_images                          list of B ints, the pictures of each sequence

    With prompts and completions concatenated as in TRL,
    `exact.token_logprobs(model, ids, mask, temperature=...)[:, -R:]` equals `old_per_token_logps` bit for bit under
    `completion_mask`, at the temperature that sampled, if it is given the inputs of pictures as well.

    Args:
        batch: a rollout.
        advantages: [B] or [B, 1], one per sequence.

    Raises `RequestError` for anything but a rollout with at least one sequence.
    """
    num = num_sequences(check_batch(batch))
    if num == 0:
        raise RequestError.for_field("number of sequences", 0, "at least 1")
    if advantages is None and "advantage" in batch.keys():
        advantages = batch["advantage"]
    if advantages is not None:
        advantages = one_per_sequence("advantages", advantages, num)
    prompts, responses, _ = places(batch)
    pad = padding_token(batch) or 0
    logprobs, sampled = _rows(batch["log_probs", "response"], responses), _split_sampled_mask(batch)
    inputs = {
        "prompt_ids": _rows(batch["tokens", "prompt"], prompts, pad, "left"),
        "prompt_mask": _rows(batch["masks", "prompt"], prompts, 0, "left").long(),
        "completion_ids": _rows(batch["tokens", "response"], responses, pad),
        "completion_mask": _rows(batch["masks", "response"], responses).long(),
        "old_per_token_logps": logprobs,
        "sampling_per_token_logps": logprobs,
        "num_items_in_batch": torch.stack([mask.sum() for mask in sampled]).sum(),
    }
    if advantages is not None:
        inputs["advantages"] = advantages.float()
    if not all(mask.all() for mask in sampled):
        inputs["tool_mask"] = pad_sequence(sampled, batch_first=True, padding_value=1).long()
    return inputs | _picture_inputs(batch, inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1])


def to_trl_rollout(batch: TensorDictBase) -> dict[str, list[Any]]:
    """Convert a rollout to the result of a `rollout_func` of TRL's GRPOTrainer; one entry per sequence.

        def rollout_func(prompts, trainer):  # each prompt is repeated num_generations times
            return to_trl_rollout(policy.rollout(prompts, SamplingParams(max_tokens=256), use_tqdm=False))

    "prompt_ids", "completion_ids" and "logprobs" are lists without padding; "env_mask" is 0 on completion tokens that
    the policy did not sample, and absent if there are none. Pictures of prompts are left out: TRL has them itself.
    Raises `RequestError` for pictures in responses, which TRL's generation has no place for (`to_trl` has).
    """
    prompts, responses, _ = places(check_batch(batch))
    starts = batch["num_prompt_tokens"].tolist()
    if any(last >= start for last, start in zip(_last_pictures(batch), starts, strict=False)):
        bound = "pictures of first prompts alone: TRL has no place for those of later turns"
        raise RequestError.for_field("batch['pictures']", "some in responses", bound)
    lists = {
        "prompt_ids": [batch["tokens", "prompt"][place].tolist() for place in prompts],
        "completion_ids": [batch["tokens", "response"][place].tolist() for place in responses],
        "logprobs": [batch["log_probs", "response"][place].tolist() for place in responses],
    }
    sampled = _split_sampled_mask(batch)
    if not all(mask.all() for mask in sampled):
        lists["env_mask"] = [mask.long().tolist() for mask in sampled]
    return lists


def _last_pictures(batch: TensorDictBase) -> list[int]:
    """The start of each sequence's last picture, -1 for one without; empty for a batch without any."""
    rows = batch["pictures"] if "pictures" in batch.keys() else ()
    found = [max((each.start for each in row), default=-1) for row in rows]
    return found if max(found, default=-1) >= 0 else []


def _picture_inputs(batch: TensorDictBase, prompt_width: int, response_width: int) -> dict[str, Any]:
    """The inputs that pictures add to rows of `prompt_width` columns for prompts and others for responses."""
    rows: Sequence[Sequence[PlacedPicture]] = batch.get("pictures").tolist() if "pictures" in batch.keys() else ()
    if not any(rows):
        return {}
    types = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    starts, full = batch["num_prompt_tokens"].tolist(), places(batch).full
    for row, (own, num_prompt, place) in enumerate(zip(rows, starts, full, strict=True)):
        tokens = batch["tokens", "full"][place]
        for each in own:
            features = (tokens[each.start : each.end] == tokens[each.start]).nonzero()[:, 0] + each.start
            types[row, features + prompt_width - num_prompt] = 1
    joined = join_arrays([each for own in rows for each in own])
    arrays = {name: torch.from_numpy(array) for name, array in joined.items()}
    return arrays | {"mm_token_type_ids": types, "num_images": [len(own) for own in rows]}


def _rows(value: Tensor, spans: list[Any], fill: int = 0, side: str = "right") -> Tensor:
    return pad_sequence([value[place] for place in spans], batch_first=True, padding_value=fill, padding_side=side)


def _split_sampled_mask(batch: TensorDictBase) -> list[Tensor]:
    """all_assistant_mask of each sequence's response, bool."""
    mask, starts = batch["masks", "all_assistant_mask"], batch["num_prompt_tokens"].tolist()
    return [mask[place][start:] for place, start in zip(places(batch).full, starts, strict=True)]
