"""Reads the inputs of a trainer's call from a rollout.

Ids, padding or the ends of packed sequences, the temperature, pictures, and the supports of its log-probs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.provenance import rollout_note
from rollout_engine.model.modules.packed_rows import positions_from
from rollout_engine.model.training.adapted_layers import active_adapters, known_adapters
from rollout_engine.model.training.batch_pictures import TokenRun, sequences_of

PICTURES = "pictures"
"""Key of a rollout with the pictures of each sequence, a tuple of `PlacedPicture`."""

_OF_TRUNCATED = (
    "If logprobs_mode='processed' with truncation (top_k, top_p, min_p) or masks is the cause, no temperature gives "
    "them: sample with return_support=True too, or with the default mode."
)


class RolloutInputs(NamedTuple):
    """Arguments of `exact.token_logprobs`."""

    input_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    temperature: float
    pictures: list[tuple[TokenRun, Sequence[PlacedPicture]]]
    """The pictures of each sequence; empty if none has any."""
    support: Any
    """The support of each sequence, if log-probs are to be renormalised over it, else None."""


def rollout_inputs(
    model: nn.Module, batch: Any, temperature: float | None, support: Any, **others: Any
) -> RolloutInputs:
    """Read a rollout, padded or packed; `temperature=None` and `support=None`: those of its log-probs.

    Raises `RequestError` for a batch that lacks keys, for `others` that are given too, for a temperature that the batch
    does not have, and if the model has the adapter that sampled, but another one is active. If none is active, as
    inside `model.disable_adapter()`, log-probs are those of the base.
    """
    for name, value in others.items():
        if value is not None:
            raise RequestError.for_field(name, "a tensor", "left out: the batch has it")
    keys = set(batch.keys(include_nested=True))
    mask = "cu_seqlens" if "cu_seqlens" in keys else ("masks", "all_attention_mask")
    if missing := [key for key in (("tokens", "full"), mask) if key not in keys]:
        hint = "Give what RolloutPolicy.rollout returned, or input_ids and attention_mask."
        raise RequestError.for_field("batch.keys()", sorted(map(str, batch.keys())), f"with {missing[0]}", hint)
    ids = check_rows(batch["tokens", "full"])
    note = rollout_note(ids)
    if temperature is None:
        if note is None or note.temperature is None:
            why = "it is a plain TensorDict" if note is None else "its log-probs are of several, or of edited logits"
            hint = f"The batch does not say which, as {why}: give the one that sampled."
            if note is not None:
                hint = f"{hint} {_OF_TRUNCATED}"
            raise RequestError.for_field("temperature", None, "a number", hint)
        temperature = note.temperature
    if note is not None:
        _check_adapter(model, note.adapters)
    packed = mask == "cu_seqlens"
    ends = batch[mask] if packed else None
    if support is None and note is not None and note.over_support:
        support = _support_of(batch)
    return RolloutInputs(ids, None if packed else batch[mask], ends, temperature, pictures_of(batch), support)


def _support_of(batch: Any) -> list[Any]:
    if "support" not in batch.keys():
        hint = "The rollout's log-probs are renormalised over it: keep the key, or give input_ids and attention_mask."
        raise RequestError.for_field("batch.keys()", sorted(map(str, batch.keys())), "with 'support'", hint)
    found: list[Any] = batch.get("support").tolist()
    return found


def sampled_temperature(batch: Any) -> float:
    """The temperature at which a rollout was sampled. Raises `RequestError` if it has no note of it."""
    note = rollout_note(batch.get(("tokens", "full"), None))
    if note is None or note.sampled_temperature is None:
        why = "it is a plain TensorDict" if note is None else "it was sampled at several"
        hint = f"The batch has no note of it, as {why}: give the one that sampled."
        raise RequestError.for_field("temperature", None, "a number", hint)
    return note.sampled_temperature


def check_rows(input_ids: Tensor) -> Tensor:
    """The token ids of a rollout, [B, T]. Raises `RequestError` for those of one row, as batch[i] has them."""
    if input_ids.dim() != 2:
        hint = "Give it before reshaping or stacking; one sequence alone is batch[i : i + 1]."
        raise RequestError.for_field("batch['tokens', 'full'].shape", list(input_ids.shape), "[B, T]", hint)
    return input_ids


def pictures_of(batch: Any) -> list[tuple[TokenRun, Sequence[PlacedPicture]]]:
    """The sequences of a rollout, padded or packed, each with its pictures; [] if none has any."""
    column = batch.get(PICTURES).tolist() if PICTURES in batch.keys() else []
    if not any(column):
        return []
    ids, ends = batch["tokens", "full"], batch.get("cu_seqlens")
    if ends is not None:
        runs = sequences_of(torch.ones_like(ids, dtype=torch.bool), positions_from(ends, ids.shape[1]))
        return list(zip(runs, column, strict=True))
    return [(run, column[run.row]) for run in sequences_of(batch["masks", "all_attention_mask"])]


def _check_adapter(model: nn.Module, sampled: frozenset[str | None]) -> None:
    active = active_adapters(model)
    if active == {None} or sampled == active or not sampled & known_adapters(model):
        return  # the trainer's names may be others
    if len(sampled) > 1:
        hint = "Compute the rows of each adapter under that adapter."
        raise RequestError.for_field("adapters that sampled the batch", _names(sampled), "one", hint)
    [name] = sampled
    hint = f"Call model.set_adapter({name!r}), or give input_ids and attention_mask to compute under another adapter."
    raise RequestError.for_field("active adapter", _names(active), f"{name!r}, which sampled the batch", hint)


def _names(adapters: frozenset[str | None]) -> str:
    return ", ".join(sorted("none" if name is None else name for name in adapters))
