"""Log-probs and entropies of next tokens by a trainer's model, equal to the engine's if `enable` was called."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.provenance import (
    LogprobsNote,
    RolloutNote,
    attach,
    mismatches,
    rollout_note,
    sent_weights,
)
from rollout_engine.exact import routing
from rollout_engine.exact.enabling import enabled_of
from rollout_engine.exact.supports import sets_of
from rollout_engine.kernels.entropy import token_entropies
from rollout_engine.kernels.row_stats import TokenSets
from rollout_engine.kernels.support_logprobs import support_logprobs
from rollout_engine.kernels.token_logprobs import token_logprobs as chosen_logprobs
from rollout_engine.model.backend import Arithmetic
from rollout_engine.model.backends import arithmetic_of
from rollout_engine.model.cpu.backend import CpuBackend
from rollout_engine.model.modules.composites import text_parts
from rollout_engine.model.modules.next_token_logprobs import (
    NextTokens,
    logits_at,
    next_tokens,
    right_padded_next_tokens,
    shared_next_tokens,
)
from rollout_engine.model.modules.packed_rows import positions_from, starts_of
from rollout_engine.model.modules.placed_features import PlacedFeatures, placing
from rollout_engine.model.modules.prefix_trial import shares_prefixes
from rollout_engine.model.packing.output_head import has_float32_head
from rollout_engine.model.training.adapted_layers import active_adapters, plain_model
from rollout_engine.model.training.call_checks import warn_once
from rollout_engine.model.training.picture_calls import batch_features
from rollout_engine.model.training.rollout_inputs import rollout_inputs, sampled_temperature
from rollout_engine.model.training.token_batch import token_batch


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor | TensorDictBase,
    attention_mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    temperature: float | None = None,
    routed_experts: Tensor | None = None,
    support: Any = None,
    **pictures: Tensor | None,
) -> Tensor:
    """Log-probs of next tokens: input_ids, any integers [B, T] -> float32 [B, T - 1], differentiable.

    Entry `[:, i]` is log softmax(logits_i / temperature)[token i + 1]; 0 if token i or i + 1 is padding, and if
    token i + 1 begins a sequence. Temperature 0 counts as 1, as in the engine.

    Args:
        input_ids: token ids; or a batch that `RolloutPolicy.rollout` returned, padded or packed, in place of it, of the
            next three and of pictures. If the model has the adapter that sampled, no other one may be active then.
        attention_mask: [B, T], padding on either side or between tokens. None: no padding.
        cu_seqlens: int [N + 1] for packed rows: sequence j is `input_ids[0, cu_seqlens[j]:cu_seqlens[j + 1]]`, B = 1.
        position_ids: int [B, T] for packed rows: positions count up, and restart at 0 where a sequence begins.
            Padding may only follow the sequences of a row. Give either this or `cu_seqlens`.
        temperature: None: that of the batch's log-probs; with ids 1.
        routed_experts: integers [B, T or T - 1, L, k]: experts that the routers of a mixture of experts choose, such as
            `batch["routed_experts"]`; -1: their own choice. Rows that begin alike are then computed apart.
        support: `batch["support"]`, one for each sequence: log-probs of its last tokens are renormalised over its
            rows, as the engine's "processed" are. None: none, or that of a batch with such log-probs.
        pictures: those of all rows in order, as the model's forward takes them (`pixel_values`, `image_grid_thw`, ...),
            and `mm_token_type_ids` [B, T], 1 at tokens that stand for one: `**exact.inputs(batch)`. Each different
            picture is encoded once. Gradients reach the vision tower.

    Raises `ValueError` for ids beyond the model's vocabulary, for shapes, masks and positions that do not fit together,
    for pictures that do not fit the ids or the model, and for a batch without a temperature (a plain TensorDict), or of
    another adapter. Warns, once per model, if the model is not exact, and if the rollout of `input_ids` had another
    dtype or temperature.
    """
    ids = _Ids(input_ids, attention_mask, cu_seqlens, position_ids, temperature, routed_experts, pictures, support)
    return _compute_at_next_tokens(model, ids, [_logprobs])[0]


def token_entropy(
    model: nn.Module,
    input_ids: Tensor | TensorDictBase,
    attention_mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    temperature: float | None = None,
    routed_experts: Tensor | None = None,
    **pictures: Tensor | None,
) -> Tensor:
    """Entropies of the distributions of next tokens, in nats -> float32 [B, T - 1], differentiable.

    Entry `[:, i]` is the entropy of softmax(logits_i / temperature), from which token i + 1 was drawn; 0 at the same
    places as `token_logprobs`. It equals `batch["entropy", "full"][:, i + 1]` of a rollout with
    `SamplingParams(entropy=True)` bit for bit. Arguments, errors and warnings are those of `token_logprobs`; without a
    temperature it is the one at which the batch was sampled.
    """
    _refuse_support(pictures)
    if temperature is None and isinstance(input_ids, TensorDictBase):
        temperature = sampled_temperature(input_ids)
    ids = _Ids(input_ids, attention_mask, cu_seqlens, position_ids, temperature, routed_experts, pictures)
    return _compute_at_next_tokens(model, ids, [_entropies])[0]


def token_logprobs_and_entropies(
    model: nn.Module,
    input_ids: Tensor | TensorDictBase,
    attention_mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    temperature: float | None = None,
    routed_experts: Tensor | None = None,
    **pictures: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs as `token_logprobs` returns them, and entropies as `token_entropy` does, of one forward.

    Both float32 [B, T - 1]. The entropies carry no gradient: those of `token_entropy` do. Arguments, errors and
    warnings are those of `token_logprobs`. Without a temperature each is at its own, which differ if a batch's
    log-probs are "raw".
    """
    _refuse_support(pictures)
    ids = _Ids(input_ids, attention_mask, cu_seqlens, position_ids, temperature, routed_experts, pictures)
    if temperature is None and isinstance(input_ids, TensorDictBase):
        temperature = sampled_temperature(input_ids)

    def entropies(found: NextTokens, of_logprobs: float, *others: Any) -> Tensor:
        return _entropies(found, temperature or of_logprobs, *others)

    values = _compute_at_next_tokens(model, ids, [_logprobs, entropies], num_with_gradient=1)
    return values[0], values[1]


def logprobs_of(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs of one token per row: logits [N, V], token_ids int64 [N] -> float32 [N], differentiable.

    The last step of `token_logprobs`, with its bits, for callers that need a model's logits too: those of an exact
    model, whose inputs were right-padded or packed.
    """
    kernel = arithmetic_of(logits.device).row_stats
    return chosen_logprobs(logits, token_ids, temperature or 1.0, kernel)


def _refuse_support(options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a support that a function of entropies is given."""
    if "support" in options:
        hint = "Entropies are of the tempered distribution over the whole vocabulary; token_logprobs takes a support."
        raise RequestError.for_field("support", type(options["support"]).__name__, "left out", hint)


class _Ids(NamedTuple):
    """Arguments of `token_logprobs`."""

    input_ids: Tensor | TensorDictBase
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    position_ids: Tensor | None
    temperature: float | None
    routed_experts: Tensor | None
    pictures: dict[str, Tensor | None]
    support: Any = None


_Values: TypeAlias = Callable[[NextTokens, float, Arithmetic, TokenSets | None], Tensor]
"""Computes a value of each of M next tokens at a temperature, float32 [M]; log-probs over their sets, if given."""


def _logprobs(found: NextTokens, temperature: float, arithmetic: Arithmetic, sets: TokenSets | None) -> Tensor:
    if sets is not None:
        return support_logprobs(found.logits, found.token_ids, temperature, sets)
    return found.logprobs(temperature, arithmetic.row_stats)


def _entropies(found: NextTokens, temperature: float, arithmetic: Arithmetic, sets: TokenSets | None) -> Tensor:
    return token_entropies(found.logits, temperature, arithmetic.row_figures)


def _compute_at_next_tokens(
    model: nn.Module, ids: _Ids, values: Sequence[_Values], num_with_gradient: int | None = None
) -> list[Tensor]:
    """Run one forward and compute values of its next tokens -> float32 [B, T - 1] each, with a note.

    `num_with_gradient`: only the first of them carry one; None: all.
    """
    input_ids, attention_mask, cu_seqlens, position_ids, temperature, routed_experts, pictures, support = ids
    placed: list[Any] = []
    if isinstance(input_ids, TensorDictBase):
        others = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, position_ids=position_ids)
        given = rollout_inputs(model, input_ids, temperature, support, **others, **pictures)
        input_ids, attention_mask, cu_seqlens, temperature, placed, support = given
    rollout = rollout_note(input_ids)
    if values[0] is _entropies:
        support = None
        rollout = rollout and rollout._replace(temperature=rollout.sampled_temperature, over_support=False)
    input_ids, mask = token_batch(model, input_ids, attention_mask)
    positions = _checked_positions(input_ids, mask, cu_seqlens, position_ids)
    features = _features(model, input_ids, mask, positions, pictures, placed)
    temperature = temperature or 1.0
    note = _note(model, temperature, input_ids, features, support is not None)
    _compare_notes(model, note, rollout, positions)
    rows: _LeftRows | None = None
    if positions is not None:
        with _replaying(model, routed_experts, mask), placing(features):
            found = _packed_next_tokens(model, input_ids, mask, positions)
    else:
        rows = _LeftRows.of(input_ids, mask, _of_batch(model, routed_experts, mask), features)
        found = _next_tokens(model, rows)
    found, sets = sets_of(support, found, mask, positions)
    arithmetic, results = kernels_of(model), []
    for index, compute in enumerate(values):
        with torch.set_grad_enabled(torch.is_grad_enabled() and index < (num_with_gradient or len(values))):
            each = compute(found, temperature, arithmetic, sets)
            results.append(found.spread(each, input_ids.shape[1] - 1) if rows is None else rows.restored(found, each))
        attach(results[-1], note)
    return results


def _note(
    model: nn.Module, temperature: float, input_ids: Tensor, features: PlacedFeatures | None, over_support: bool
) -> LogprobsNote:
    dtype = str(next(text_parts(plain_model(model))[0].parameters()).dtype).removeprefix("torch.")
    fp32_head = dtype != "float32" and has_float32_head(model)
    adapters, sent = active_adapters(model), sent_weights(model)
    enabled = enabled_of(model)
    token = None if enabled is None else getattr(enabled.model.config, "image_token_id", None)
    has_pictures = features is not None or (token is not None and not bool((input_ids == token).any()))
    known = dtype, temperature, enabled is not None, fp32_head, adapters, sent, has_pictures
    return LogprobsNote(*known, over_support)


class _LeftRows(NamedTuple):
    """A batch whose real tokens were moved to the left of their rows."""

    order: Tensor
    """int64 [B, T]: the place of each token before."""
    ids: Tensor
    real: Tensor
    """bool [B, T]: not padding."""
    is_moved: bool
    routed_experts: Tensor | None = None
    """int16 [B, T, L, k], to be replayed."""
    features: PlacedFeatures | None = None

    @classmethod
    def of(
        cls, input_ids: Tensor, mask: Tensor, routed_experts: Tensor | None, features: PlacedFeatures | None
    ) -> "_LeftRows":
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # real tokens to the left, in order
        real = mask.gather(1, order)
        if routed_experts is not None:
            routed_experts = routed_experts[torch.arange(len(order), device=order.device)[:, None], order]
        is_moved = not torch.equal(real, mask)
        features = features and features.gather(order)
        return cls(order, input_ids.gather(1, order), real, is_moved, routed_experts, features)

    def restored(self, found: NextTokens, values: Tensor) -> Tensor:
        """Values [M] of `found`, next tokens of the moved rows -> [B, T - 1] by the places before."""
        result = found.spread(values, self.ids.shape[1] - 1)
        if self.is_moved:
            spread = result.new_zeros(self.ids.shape).scatter(1, self.order[:, 1:], result)  # of token order[i + 1]
            result = spread[:, 1:]
        return result


def _next_tokens(model: nn.Module, rows: _LeftRows) -> NextTokens:
    if rows.routed_experts is not None:
        length = max(int(rows.real.sum(1).max()), 2)  # as many as `right_padded_next_tokens` computes
        with routing.replay(model, rows.routed_experts[:, :length]):
            return right_padded_next_tokens(model, rows.ids, rows.real, rows.features)
    is_shared = enabled_of(model) is not None and shares_prefixes(model)
    compute = shared_next_tokens if is_shared else right_padded_next_tokens
    return compute(model, rows.ids, rows.real, rows.features)


def _features(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    given: dict[str, Tensor | None],
    placed: list[Any],
) -> PlacedFeatures | None:
    """The features of a batch's pictures, from arguments or those of its rollout; None if there are none."""
    if not given and not placed:
        return None
    enabled = enabled_of(model)
    if enabled is None:
        raise ConfigError(
            f"{type(model).__name__} was not given to exact.enable, and pictures are computed by exact models alone. "
            "Call exact.enable(model) once, before training."
        )
    return batch_features(enabled.model, input_ids, mask, positions, given, placed)


def _of_batch(model: nn.Module, routed_experts: Tensor | None, mask: Tensor) -> Tensor | None:
    return None if routed_experts is None else routing.for_batch(model, routed_experts, mask)


def _replaying(model: nn.Module, routed_experts: Tensor | None, mask: Tensor) -> AbstractContextManager[None]:
    found = _of_batch(model, routed_experts, mask)
    return nullcontext() if found is None else routing.replay(model, found)


def _packed_next_tokens(model: nn.Module, input_ids: Tensor, real: Tensor, position_ids: Tensor) -> NextTokens:
    wanted = (real & ~starts_of(position_ids))[:, 1:]
    inputs = dict(input_ids=input_ids, attention_mask=None if real.all() else real, position_ids=position_ids)
    if len(input_ids) == 1 and enabled_of(model) is not None:
        logits = logits_at(wanted[0].nonzero()[:, 0], model, **inputs)
        return NextTokens(logits, input_ids[:, 1:][wanted], wanted)
    return next_tokens(model(**inputs, use_cache=False).logits[:, :-1], input_ids, wanted)


def kernels_of(model: nn.Module) -> Arithmetic:
    """The kernels that compute log-probs of a model's logits."""
    enabled = enabled_of(model)  # scores of a model that is not enabled are close, and warned of
    return CpuBackend.arithmetic if enabled is None else enabled.arithmetic


def _checked_positions(
    input_ids: Tensor, mask: Tensor, cu_seqlens: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    """position_ids int64 [B, T] of packed rows; None if every row is one sequence."""
    if cu_seqlens is None:
        if position_ids is not None and position_ids.shape != input_ids.shape:
            raise ValueError(
                f"position_ids must be {tuple(input_ids.shape)} like input_ids, got {tuple(position_ids.shape)}"
            )
        return position_ids
    if position_ids is not None:
        raise ValueError("Both cu_seqlens and position_ids were given; each says where sequences begin: give one.")
    if len(input_ids) != 1 or not mask.all():
        shape = tuple(input_ids.shape)
        raise ValueError(
            f"cu_seqlens goes with one row [1, T] without padding, got input_ids of shape {shape}"
            + ("" if mask.all() else f" with {int((~mask).sum())} masked tokens")
        )
    return positions_from(cu_seqlens.to(input_ids.device), input_ids.shape[1])


def _compare_notes(model: nn.Module, ours: LogprobsNote, rollout: RolloutNote | None, positions: Tensor | None) -> None:
    """Warn of settings that make log-probs differ from the rollout's; refuse packed rows without positions."""
    if not ours.is_enabled:
        warn_once(
            model,
            f"exact.token_logprobs: {type(model).__name__} was not given to exact.enable, so its log-probs are "
            "close to the engine's, not equal. Call exact.enable(model) once, before training.",
        )
    if rollout is None:
        return
    if rollout.is_packed and positions is None:
        raise ValueError(
            "These tokens are packed (layout='packed'): as one sequence, each would attend to those before it. Pass "
            "cu_seqlens=batch['cu_seqlens']."
        )
    for text in mismatches(ours, rollout):
        warn_once(model, f"exact.token_logprobs: {text}. Until then ratios will not be exactly 1.0.")
