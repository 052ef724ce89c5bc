"""Notes on tensor objects: how the tokens of a rollout, or the log-probs of a trainer, were made.

A note travels with the object that a batch returns, and is gone from what is computed from it (slices, copies, moved
tensors). So it serves to name mistakes early, never to decide what is computed.
"""

from typing import NamedTuple


class RolloutNote(NamedTuple):
    """On the tokens of a rollout."""

    dtype: str
    """Dtype of the engine's weights, such as "float32"."""
    temperature: float | None
    """At which its log-probs were computed; None: several, or log-probs of edited logits."""
    is_packed: bool
    """Several sequences lie end to end in a row."""
    fp32_head: bool = False
    """Logits were float32 in an engine of another dtype."""


class LogprobsNote(NamedTuple):
    """On what `exact.token_logprobs` returns."""

    dtype: str
    temperature: float
    is_enabled: bool
    """The model computed by the engine's arithmetic."""
    fp32_head: bool = False
    """Logits were float32 in a model of another dtype."""


_NAME = "_rollout_engine_note"


def attach(tensor: object, note: RolloutNote | LogprobsNote) -> None:
    """Note on `tensor`, instead of what was noted before."""
    setattr(tensor, _NAME, note)


def rollout_note(tensor: object) -> RolloutNote | None:
    """The note on tokens, if there is one."""
    note = getattr(tensor, _NAME, None)
    return note if isinstance(note, RolloutNote) else None


def logprobs_note(tensor: object) -> LogprobsNote | None:
    """The note on log-probs, if there is one."""
    note = getattr(tensor, _NAME, None)
    return note if isinstance(note, LogprobsNote) else None


def describe_heads(trainers_is_float32: bool) -> str:
    """Advice where only one of trainer and engine has a float32 head."""
    if trainers_is_float32:
        return (
            "The trainer's logits are float32, the engine's are not: give the engine fp32_head=True, or call "
            "exact.enable(model, fp32_head=False)"
        )
    return (
        "The engine's logits are float32 (fp32_head=True), the trainer's are not: call exact.enable(model, "
        "fp32_head=True)"
    )
