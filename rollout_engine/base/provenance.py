"""Notes on tensor objects: how the tokens of a rollout, or the log-probs of a trainer, were computed.

A note belongs to one tensor object; tensors that torch computes from it (slices, copies, moved tensors) have none.
Parts, clones, moved copies and concatenations of a `RolloutBatch` get those of the whole. Notes serve to report
mistakes early, and do not change any computation, but for `EpisodesNote`: it gives arguments of `advantages`
their defaults.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rollout_engine.base.outputs import Quantization


class RolloutNote(NamedTuple):
    """Note on the tokens of a rollout."""

    dtype: str
    """Dtype of the engine's weights, such as "float32"."""
    temperature: float | None
    """Temperature of its log-probs; None: several, or log-probs of edited logits."""
    is_packed: bool
    """Whether rows hold several sequences end to end."""
    fp32_head: bool = False
    """Whether an engine of another dtype computed float32 logits."""
    quantization: Quantization | None = None
    """How the engine rounded the weights of layers; None: not at all."""
    adapters: frozenset[str | None] = frozenset()
    """Names of the adapters that sampled, None for the base alone; empty: not known."""
    live_version: int | None = None
    """Version of the live weights when the rollout was returned; of several rollouts the newest. None: not known."""
    has_pictures: bool = False
    """Whether any prompt of it had pictures."""
    over_support: bool = False
    """Whether its log-probs are those of the model's own logits, renormalised over batch["support"]."""
    sampled_temperature: float | None = None
    """Temperature of its entropies, at which it was sampled, greedy as 1; None: several, or not known."""


class LogprobsNote(NamedTuple):
    """Note on the result of `exact.token_logprobs`."""

    dtype: str
    temperature: float
    is_enabled: bool
    """Whether the model was given to `exact.enable`."""
    fp32_head: bool = False
    """Whether a model of another dtype computed float32 logits."""
    adapters: frozenset[str | None] = frozenset()
    """Names of the adapters that were active, None for the base alone."""
    sent: "Sent | None" = None
    """Whether the model still has the weights that were sent last; None: not known."""
    has_pictures: bool = False
    """Whether pictures were given, or no token stands for one."""
    over_support: bool = False
    """Whether they are renormalised over a support."""


class Sent(NamedTuple):
    """How a model's weights have changed since `update_weights` sent them, or else since `exact.enable`."""

    version: int | None
    """Version as which they were sent; None: they were not."""
    is_changed: bool
    """Whether they were written to since, as by an optimizer step."""


class EpisodesNote(NamedTuple):
    """Note on the "group_id" of a batch whose rows are not one episode each, or some of whose episodes failed."""

    episode_ids: tuple[int, ...]
    """Episode of each row."""
    is_counted: tuple[bool, ...]
    """Whether the row's episode counts in the statistics of its group: it has not failed."""


_NAME = "_rollout_engine_note"
_SENT = "_rollout_engine_sent"
"""Attribute of a model's first parameter, the same object inside any wrapper: (version, state) when it was sent."""
_NUM_COMPARED = 4


def attach(tensor: object, note: RolloutNote | LogprobsNote | EpisodesNote | None) -> None:
    """Attach a note to `tensor`, replacing any other; None removes it."""
    setattr(tensor, _NAME, note)


def rollout_note(tensor: object) -> RolloutNote | None:
    """The note on tokens, if there is one."""
    note = getattr(tensor, _NAME, None)
    return note if isinstance(note, RolloutNote) else None


def joined(notes: Iterable[RolloutNote | None]) -> RolloutNote | None:
    """The note on tokens that come from several tensors with these notes; None if one has none.

    Of engines that differ, the note is that of one which rounded weights, if any did.
    """
    found = list(notes)
    known = sorted((note for note in found if note is not None), key=lambda note: note.quantization is None)
    if not known or len(known) < len(found):
        return None
    same_temperature = len({(note.temperature, note.over_support) for note in known}) == 1
    same_sampled = len({note.sampled_temperature for note in known}) == 1
    versions = [note.live_version for note in known if note.live_version is not None]
    return known[0]._replace(
        temperature=known[0].temperature if same_temperature else None,
        over_support=known[0].over_support and same_temperature,
        adapters=frozenset().union(*(note.adapters for note in known)),
        live_version=max(versions) if len(versions) == len(known) else None,
        has_pictures=any(note.has_pictures for note in known),
        sampled_temperature=known[0].sampled_temperature if same_sampled else None,
    )


def logprobs_note(tensor: object) -> LogprobsNote | None:
    """The note on log-probs, if there is one."""
    note = getattr(tensor, _NAME, None)
    return note if isinstance(note, LogprobsNote) else None


def episodes_note(tensor: object) -> EpisodesNote | None:
    """The note on group ids, if there is one."""
    note = getattr(tensor, _NAME, None)
    return note if isinstance(note, EpisodesNote) else None


def weights_state(model: Any) -> tuple[int, int, int] | None:
    """A state that differs once an optimizer has stepped; None for anything but a module with parameters.

    Number of parameters, torch's counts of writes, and a checksum of the first values of those on the CPU, since fused
    optimizers are not counted.
    """
    try:
        parameters = list(model.parameters())
        writes = sum(parameter._version for parameter in parameters)
    except (AttributeError, TypeError, RuntimeError):  # no module, or tensors of inference mode
        return None
    near = [p.detach() for p in parameters if type(p).__name__ == "Parameter" and p.is_cpu and p.is_contiguous()]
    values = repr([tensor.view(-1)[:_NUM_COMPARED].tolist() for tensor in near])
    return (len(parameters), writes, zlib.crc32(values.encode())) if parameters else None


def note_sent(model: Any, state: tuple[int, int, int] | None, version: int | None) -> None:
    """Note that the weights of `model` were sent as a version (None: enabled) when they had this state."""
    if state is not None:
        setattr(next(iter(model.parameters())), _SENT, (version, state))


def sent_weights(model: Any) -> Sent | None:
    """The version of the weights at `note_sent`, and whether they have changed since; None if not known."""
    now = weights_state(model)
    found = None if now is None else getattr(next(iter(model.parameters())), _SENT, None)
    if now is None or found is None or found[1][0] != now[0]:
        return None
    return Sent(found[0], found[1] != now)


def mismatches(trainer: LogprobsNote, rollout: RolloutNote) -> Iterator[str]:
    """Settings that make a trainer's log-probs differ from a rollout's, with advice; sentences without a full stop."""
    if rollout.quantization is not None:
        yield (
            f"The engine rounds the weights of layers (quantization={rollout.quantization!r}), the trainer does not: "
            "correct for it by importance weights, or leave quantization out of the engine's options"
        )
    if trainer.dtype != rollout.dtype:
        yield (
            f"The trainer computes in {trainer.dtype}, the engine sampled in {rollout.dtype}: load the model with "
            f"dtype=torch.{rollout.dtype}, or the engine with dtype='{trainer.dtype}'"
        )
    elif trainer.fp32_head and not rollout.fp32_head:
        yield (
            "The trainer's logits are float32, the engine's are not: give the engine fp32_head=True, or call "
            "exact.enable(model, fp32_head=False)"
        )
    elif rollout.fp32_head and not trainer.fp32_head:
        yield (
            "The engine's logits are float32 (fp32_head=True), the trainer's are not: call exact.enable(model, "
            "fp32_head=True)"
        )
    if rollout.has_pictures and not trainer.has_pictures:
        yield (
            "The rollout's prompts have pictures, and the trainer's log-probs were computed without them: pass "
            "**exact.inputs(batch) to exact.token_logprobs, or the batch itself"
        )
    if rollout.over_support and not trainer.over_support:
        yield (
            "The rollout's log-probs are renormalised over the tokens that truncation and masks had left, the "
            "trainer's are not: pass support=batch['support'] to exact.token_logprobs, or the batch itself"
        )
    elif trainer.over_support and not rollout.over_support and rollout.temperature is not None:
        yield (
            "The trainer's log-probs are renormalised over a support, the rollout's are of whole rows: sample with "
            "logprobs_mode='processed', or call exact.token_logprobs without support"
        )
    if rollout.temperature not in (None, trainer.temperature):
        yield (
            f"The trainer's log-probs are of temperature {trainer.temperature:g}, the rollout's of "
            f"{rollout.temperature:g}: pass temperature={rollout.temperature:g} to exact.token_logprobs"
        )
