"""Comparison of a trainer's log-probs with a rollout's, naming the likely cause of a difference."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from rollout_engine.base.provenance import LogprobsNote, Sent, logprobs_note, mismatches, rollout_note
from rollout_engine.exact.distributions import FullReport, HasDistributions, compare_distributions
from rollout_engine.exact.trainer import token_logprobs


class ExactReport(NamedTuple):
    """Result of comparing a trainer's log-probs of sampled tokens with the engine's; `print` gives a summary."""

    num_tokens: int
    """Sampled tokens compared: those whose whole context was computed under the version that sampled them."""
    num_different: int
    """Compared tokens whose log-probs are not equal bit for bit."""
    largest_difference: float
    """Largest absolute difference of two log-probs, in nats; inf if one of them is NaN."""
    first_different: tuple[int, int] | None
    """(row, column) of the first such token in `batch["tokens", "full"]`."""
    num_mixed: int
    """Sampled tokens left out: they continued KV of an older version (`kv="keep"`), which no trainer can reproduce."""
    cause: str
    """The likely cause, and what to do; "" if all are equal."""

    @property
    def is_exact(self) -> bool:
        """Whether all compared tokens are equal."""
        return self.num_different == 0

    def __str__(self) -> str:
        left_out = f" ({self.num_mixed} more, sampled over older KV, were left out)" if self.num_mixed else ""
        if self.is_exact:
            return f"exact: {self.num_tokens} tokens equal bit for bit{left_out}"
        return (
            f"not exact: {self.num_different} of {self.num_tokens} tokens differ, by up to "
            f"{self.largest_difference:.3g}, first at {self.first_different}{left_out}. {self.cause}"
        )


@overload
def check(
    batch: Any, logprobs: Tensor | None = None, temperature: float | None = None, *, model: nn.Module | None = None
) -> ExactReport:
    """Compare log-probs of sampled tokens."""


@overload
def check(
    batch: Any,
    logprobs: None = None,
    temperature: float | None = None,
    *,
    model: nn.Module,
    engine: HasDistributions,
    full: Literal[True],
) -> FullReport:
    """Compare whole distributions."""


def check(
    batch: Any,
    logprobs: Tensor | None = None,
    temperature: float | None = None,
    *,
    model: nn.Module | None = None,
    engine: HasDistributions | None = None,
    full: bool = False,
) -> ExactReport | FullReport:
    """Compare a trainer's log-probs of sampled tokens with the rollout's own; with `full`, whole distributions.

        exact.check(batch, exact.token_logprobs(model, batch))
        exact.check(batch, model=model)                                       # the same
        exact.check(batch, model=model, engine=policy, full=True)             # every token of the vocabulary

    Args:
        batch: the result of `RolloutPolicy.rollout`, padded or packed.
        logprobs: float [B, T - 1] from `exact.token_logprobs`; entry `[:, i]` belongs to token `i + 1` of
            `batch["tokens", "full"]`. None: those of `model`.
        temperature: that of `logprobs`, read only if they carry no note of it; with `full` that of the distributions,
            None: at which the batch was sampled.
        model: the trainer's, as `exact.token_logprobs` takes it.
        engine: a `RolloutPolicy`, which computes the distributions anew under its live weights, in its steps.
        full: compare at each sampled token the log-probs of the whole vocabulary, in bounded memory: one sequence at a
            time, a forward of the trainer each and a request to the engine for each token.

    Raises `ValueError` for anything but a rollout, for log-probs of another shape, and for arguments that do not belong
    together; with `full` as `compare_distributions` does.
    """
    if not hasattr(batch, "keys"):
        what = f"batch must be what RolloutPolicy.rollout returned, got {type(batch).__name__}"
        raise ValueError(f"{what}: call exact.check(batch, logprobs).")
    _check_arguments(logprobs, model, engine, full)
    if full and model is not None and engine is not None:
        return compare_distributions(batch, model, engine, temperature)
    if model is not None:
        with torch.no_grad():
            logprobs = token_logprobs(model, batch, temperature=temperature)
    assert logprobs is not None, "the arguments were checked"
    return _compare_sampled(batch, logprobs, temperature or 1.0)


def _check_arguments(
    logprobs: Tensor | None, model: nn.Module | None, engine: HasDistributions | None, full: bool
) -> None:
    if full and (model is None or engine is None or logprobs is not None):
        call = "exact.check(batch, model=model, engine=policy, full=True)"
        raise ValueError(f"full=True compares a model with an engine: {call}.")
    if full and not hasattr(engine, "distributions"):
        call = "engine=RolloutPolicy(llm)"
        raise ValueError(
            f"engine must be a RolloutPolicy, which has distributions, got {type(engine).__name__}: {call}."
        )
    if not full and ((logprobs is None) == (model is None) or engine is not None):
        raise ValueError(
            "Give logprobs or the model that computes them: exact.check(batch, logprobs), or exact.check(batch, "
            "model=model). engine= goes with full=True."
        )


def _compare_sampled(batch: Any, logprobs: Tensor, temperature: float) -> ExactReport:
    theirs = batch["log_probs", "full"][:, 1:]
    if logprobs.shape != theirs.shape:
        raise ValueError(
            f"logprobs must be {tuple(theirs.shape)}, one for each token after the first of batch['tokens', 'full'], "
            f"got {tuple(logprobs.shape)}"
        )
    ours = logprobs.detach().to(theirs.device, torch.float32)
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    versions = batch["policy_version"][:, 1:]
    compared = sampled & (batch["kv_min_version"][:, 1:] == versions)
    different = compared & (ours != theirs)
    places = different.nonzero()
    gaps = (ours - theirs)[different].abs().nan_to_num(torch.inf)
    found = _Differences(batch, ours, theirs, compared, different, gaps, _adapters(logprobs), _sent(logprobs))
    return ExactReport(
        num_tokens=int(compared.sum()),
        num_different=len(places),
        largest_difference=float(gaps.max()) if len(places) else 0.0,
        first_different=(int(places[0, 0]), int(places[0, 1]) + 1) if len(places) else None,
        num_mixed=int((sampled & ~compared).sum()),
        cause=_cause(found, logprobs, temperature) if len(places) else "",
    )


class _Differences(NamedTuple):
    """Compared log-probs and masks [B, T - 1], and the `gaps` [number of differing tokens]."""

    batch: Any
    ours: Tensor
    theirs: Tensor
    compared: Tensor
    different: Tensor
    gaps: Tensor
    adapters: frozenset[str | None]
    """Names of the adapters that the compared log-probs are under, None for the base alone; empty: not known."""
    sent: Sent | None
    """How the trainer's weights had changed since they were sent, when the log-probs were computed."""


def _adapters(logprobs: Tensor) -> frozenset[str | None]:
    note = logprobs_note(logprobs) or rollout_note(logprobs)
    return frozenset() if note is None else note.adapters


def _sent(logprobs: Tensor) -> Sent | None:
    note = logprobs_note(logprobs)
    return None if note is None else note.sent


def _cause(found: _Differences, logprobs: Tensor, temperature: float) -> str:
    if text := _from_notes(found, logprobs, temperature):
        return text
    if num := int(found.ours[found.compared].isnan().sum()):
        return f"{num} of the trainer's log-probs are NaN: check its weights and gradients."
    causes = _shifted, _packed_as_one, _of_no_temperature, _other_version, _stepped, _by_size
    return next(text for cause in causes if (text := cause(found)))


def _from_notes(found: _Differences, logprobs: Tensor, temperature: float) -> str:
    """A cause that the notes on the tensors show."""
    trainer, rollout = logprobs_note(logprobs), rollout_note(found.batch["tokens", "full"])
    if trainer is not None and not trainer.is_enabled:
        return "The model was not made exact: call exact.enable(model) once, before training."
    if rollout is None:
        return ""
    if trainer is None:
        trainer = LogprobsNote(rollout.dtype, temperature or 1.0, True, rollout.fp32_head)
        trainer = trainer._replace(over_support=rollout.over_support)
    return next((f"{text}." for text in mismatches(trainer, rollout)), "")


def _shifted(found: _Differences) -> str:
    """Log-probs that are equal one column away: a missing or superfluous slice."""
    early, late = slice(None, -1), slice(1, None)
    both = found.compared[:, late] & found.compared[:, early]
    for mine, right in ((early, late), (late, early)):
        if both.any() and torch.equal(found.ours[:, mine][both], found.theirs[:, right][both]):
            return "They are one column off: logprobs[:, i] belongs to token i + 1 of the row."
    return ""


def _packed_as_one(found: _Differences) -> str:
    """Packed sequences of which only the first is equal: the trainer let the others attend to it."""
    if "cu_seqlens" not in found.batch.keys():
        return ""
    second = int(found.batch["cu_seqlens"][1])
    first_differs = bool(found.different[:, : second - 1].any())
    rest = found.compared[:, second - 1 :]
    if first_differs or not rest.any() or not found.different[:, second - 1 :][rest].float().mean() > 0.9:
        return ""
    return (
        "Only the first sequence of the packed row is equal: the trainer read the row as one sequence. Pass "
        "cu_seqlens=batch['cu_seqlens'] to exact.token_logprobs."
    )


def _of_no_temperature(found: _Differences) -> str:
    """Log-probs that are not of whole rows at one temperature."""
    note = rollout_note(found.batch["tokens", "full"])
    if note is None or note.temperature is not None:
        return ""
    return (
        "The rollout's log-probs are of edited or truncated logits (logprobs_mode='processed'), or of several "
        "temperatures, and exact.token_logprobs computes those of whole rows at one: sample with logprobs_mode="
        "'tempered', the default, or with return_support=True and no penalties or bias, and one temperature."
    )


def _other_version(found: _Differences) -> str:
    """Versions whose tokens are equal, if those of others are not."""
    versions = found.batch["policy_version"][:, 1:]
    differing, compared = (set(versions[mask].tolist()) for mask in (found.different, found.compared))
    equal = compared - differing
    if not equal or not differing:
        return ""
    return (
        f"Tokens sampled by {_versions(equal)} are equal, those by {_versions(differing)} are not: the trainer has the "
        f"weights of {_versions(equal)}. Compare each token with log-probs under its own version."
    )


def _stepped(found: _Differences) -> str:
    """Parameters that were written to since the version that sampled was sent, as in later epochs of PPO."""
    sent, versions = found.sent, set(found.batch["policy_version"][:, 1:][found.compared].tolist())
    if sent is None or not sent.is_changed or sent.version not in (None, *versions) or len(versions) > 1:
        return ""
    since = "exact.enable" if sent.version is None else f"update_weights sent {_versions(versions)}"
    return (
        f"Differences of this size come from weights that are not those of {_versions(versions)}, which is expected "
        f"here: the trainer's were written to since {since}, as by the optimizer steps of earlier minibatches or "
        "epochs on this rollout. To check exactness, compare before the first step on a rollout. If the rollout was "
        "made after these steps, update_weights was not called before it."
    )


def _by_size(found: _Differences) -> str:
    versions = set(found.batch["policy_version"][:, 1:][found.compared].tolist())
    largest, same_size = float(found.gaps.max()), float(found.gaps.median())
    pushed = (
        f"weights that are not those of {_versions(versions)} (the trainer stepped, or was loaded anew, and "
        "update_weights was not called before the rollout; or this rollout is older than the last update; or "
        "update_weights was given other weights)"
    )
    rounding = "a model that was not given to exact.enable, another dtype than the engine's, or deterministic=False"
    adapters = _other_adapters(found)
    if largest < 1e-3 or (same_size < 1e-2 and largest < 0.3):
        return " ".join([f"Differences of this size come from rounding ({rounding}), or from {pushed}.", *adapters])
    if adapters:
        advice = "pass lora_request=NAME to rollout, lora=NAME to score, or activate the adapter in the trainer"
        return f"{' '.join(adapters)} If these are not the same weights, {advice}. Else they come from {pushed}."
    return (
        f"Differences of this size come from {pushed}, from another temperature, or from other tokens or masks "
        "(exact.token_logprobs takes batch['masks', 'all_attention_mask'])."
    )


def _other_adapters(found: _Differences) -> list[str]:
    """A sentence if the rollout was not sampled under the adapter that the log-probs are under."""
    note = rollout_note(found.batch["tokens", "full"])
    if note is None or not note.adapters or not found.adapters or note.adapters == found.adapters:
        return []
    return [f"The rollout was sampled {_under(note.adapters)}, the log-probs are {_under(found.adapters)}."]


def _under(adapters: frozenset[str | None]) -> str:
    names = [f"under the adapter '{name}'" for name in sorted(adapters - {None}, key=str)]
    return " and ".join([*names, *(["without an adapter"] if None in adapters else [])])


def _versions(versions: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(versions)))
    return f"version {numbers}" if len(versions) == 1 else f"versions {numbers}"
