"""Recognises layers, bases and heads whose forwards put their parts together as Llama's do, by trial.

    layer    x + f attention(norm(x)), or a mixer in its place, then x + f mlp(norm(x)); f a number (Granite), or 1;
             or one of the two (Nemotron-H); or x + norm(attention(x)), then x + norm(mlp(x)) (OLMo)
    base     embed tokens, times a number or 1, rotate by positions or not at all, run all layers, norm
    head     one product of the states that are asked for, divided by a number or 1

Numbers are attributes of known names; a forward has to use those that it reads as the trial does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollout_engine.model.modules.forward_trial import (
    NUM_TOKENS,
    SCALES,
    Forward,
    are_watched,
    layer_inputs,
    require,
    require_same,
    unmatched_reason,
    watched_positions,
    waves,
)
from rollout_engine.model.modules.part_names import names_by_role
from rollout_engine.model.modules.passed_layers import PassedLayer


class BlockPattern(NamedTuple):
    """How a layer, a base or a head puts its parts together."""

    reason: str | None
    """Why it does so in another way; None if it does not."""
    number: float = 1.0
    """Multiplies results that a layer adds to its input, or embeddings of a base; divides logits of a head."""
    is_precise: bool = False
    """Whether logits become float32 at last."""


def layer_pattern(layer: nn.Module) -> BlockPattern:
    """The pattern of a decoder layer."""
    factor = _number(layer, "residual_multiplier")
    return BlockPattern(unmatched_reason("layer", layer, lambda trial: _run_layer(trial, factor)), factor)


def base_pattern(base: nn.Module) -> BlockPattern:
    """The pattern of a base model, whose layers return their output, or a tuple of it and others."""
    factor = _number(base, "embedding_multiplier")
    reason = unmatched_reason("base", base, lambda trial: _run_base(trial, factor))
    if reason is not None:
        other = unmatched_reason("base", base, lambda trial: _run_base(trial, factor, are_tuples=True))
        reason = None if other is None else reason
    return BlockPattern(reason, factor)


def head_pattern(model: nn.Module) -> BlockPattern:
    """The pattern of a causal LM around its base."""
    divisor = _number(getattr(model, "config", None), "logits_scaling")
    dtypes: list[torch.dtype] = []
    reason = unmatched_reason("head", model, lambda trial: _run_head(trial, divisor, dtypes))
    if reason is None and (divisor != 1.0) and dtypes == [torch.float32]:
        reason = f"{type(model).__name__} divides logits and changes their dtype"
    return BlockPattern(reason, divisor, is_precise=dtypes == [torch.float32])


def _number(owner: object, name: str) -> float:
    """A number that `owner` has, as it is; 1.0 if it has none."""
    found = getattr(owner, name, 1.0)
    return found if type(found) in (int, float) else 1.0


class _Norm:
    """Replaces the norm of a layer or a base."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute, self.weight = compute, torch.zeros(8)

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x)


def _run_layer(forward: Forward, factor: float) -> None:
    names = names_by_role(forward.children) or {}
    if names.keys() == {"norm", "half"}:
        return _run_half(forward, factor)
    rotations, seen = object(), []

    def attend(hidden_states: Tensor, position_embeddings: object = None, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append(position_embeddings)
        return hidden_states.roll(1, dims=1) * 0.5, None

    def mix(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states.roll(1, dims=1) * 0.5

    known: dict[str, Callable[..., Any]] = {
        "attention_norm": lambda x: x.flip(2) * 1.25,
        "attention": attend,
        "mixer": mix,
        "mlp_norm": lambda x: x.roll(1, dims=2) * 0.75,
        "mlp": lambda x: x.flip(1) * 1.5,
        "mixture": lambda x: x.flip(1) * 1.5,
        "shared_mlp": lambda x: x.flip(2) * 0.7,
        "norm_behind": lambda x: x.roll(2, dims=2) * 1.1,
    }
    require(names.keys() <= known.keys() and ("attention" in names) != ("mixer" in names), "has other parts")
    added = [known[role] for role in ("mlp", "mixture", "shared_mlp") if role in names]
    parts: dict[str, object] = {name: known[role] for role, name in names.items()}
    for scale in SCALES:
        x = waves(1, NUM_TOKENS, 8, phase=0.3) * scale
        result = forward(parts, x, **layer_inputs(rotations))
        if "norm_behind" in names:
            middle = x + known["mlp_norm"](x.roll(1, dims=1) * 0.5) * factor
            wanted = middle + known["norm_behind"](sum(part(middle) for part in added)) * factor
        else:
            middle = x + known["attention_norm"](x).roll(1, dims=1) * 0.5 * factor
            wanted = middle + sum(part(known["mlp_norm"](middle)) for part in added) * factor
        require_same(result[0] if isinstance(result, tuple) else result, wanted, "adds its parts otherwise")
    require(all(each is rotations for each in seen), "changes rotary embeddings")


def _run_half(forward: Forward, factor: float) -> None:
    """A layer of one norm and attention, a mixer, an MLP or a mixture; of attention the first of two results counts."""
    names = names_by_role(forward.children) or {}

    def attend(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states.roll(1, dims=1) * 0.5, None

    def compute(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states.roll(1, dims=1) * 0.5

    attends = names_by_role(dict(forward.children[names["half"]].named_children())) is not None
    parts: dict[str, object] = {names["half"]: attend if attends else compute}
    parts[names["norm"]] = _Norm(lambda x: x.flip(2) * 1.25)
    for scale in SCALES:
        x = waves(1, NUM_TOKENS, 8, phase=0.3) * scale
        result = forward(parts, x, **layer_inputs(None))
        wanted = x + x.flip(2).mul(1.25).roll(1, dims=1) * 0.5 * factor
        require_same(result[0] if isinstance(result, tuple) else result, wanted, "adds its parts otherwise")


def _run_base(forward: Forward, factor: float, *, are_tuples: bool = False) -> None:
    """`are_tuples`: layers return tuples."""
    names = names_by_role(forward.children) or {}
    require(names.keys() - {"rotary"} == {"embedding", "layers", "norm"}, "has other parts")
    given = (torch.zeros(1), torch.zeros(1)) if "rotary" in names else None
    layers = list(forward.children["layers"].children())
    count = len(layers)
    ids, positions = torch.arange(NUM_TOKENS)[None], watched_positions()
    for scale in SCALES:
        embedded = waves(1, NUM_TOKENS, 8, phase=0.3) * scale
        seen: list[Any] = []

        def embed(tokens: Tensor, embedded: Tensor = embedded) -> Tensor:
            return embedded

        def rotate(x: Tensor, position_ids: Tensor) -> object:
            require(are_watched(position_ids, positions), "rotates by other positions")
            return given

        def layer(x: Tensor, position_embeddings: object = None, seen: list[object] = seen, **kwargs: Any) -> Any:
            seen.append(position_embeddings)
            out = x.roll(1, dims=2) * 0.9
            return (out, None) if are_tuples else out

        stubs = [partial(layer) for _ in layers]
        for stub, real in zip(stubs, layers, strict=True):
            stub.__dict__["block_type"] = getattr(real, "block_type", None)  # by which some bases choose a mask
        known = {"embedding": embed, "rotary": rotate, "layers": stubs, "norm": lambda x: x.flip(1)}
        parts = {name: known[role] for role, name in names.items()}
        output = forward(parts, input_ids=ids, position_ids=positions, use_cache=False)
        wanted = embedded * factor
        for _ in range(count):
            wanted = wanted.roll(1, dims=2) * 0.9
        require_same(output.last_hidden_state, wanted.flip(1), "does more than embed, run its layers and norm")
        wrong = [each for each, real in zip(seen, layers, strict=True) if each is not given and _attends(real)]
        require(len(seen) == count and not wrong, "changes rotary embeddings")


def _attends(layer: nn.Module) -> bool:
    """Whether a layer has attention, or parts of other names."""
    if isinstance(layer, PassedLayer):
        return layer.attends
    names = names_by_role(dict(layer.named_children()))
    return names is None or "mixer" not in names


def _run_head(forward: Forward, divisor: float, dtypes: list[torch.dtype]) -> None:
    """`dtypes` gets that of the logits of bfloat16 states."""
    rows = torch.tensor([2, 0])
    names = forward.children.keys() - {"lm_head"}
    for scale in SCALES:
        states = waves(1, NUM_TOKENS, 8, phase=0.3) * scale
        base = MoeModelOutputWithPast(last_hidden_state=states)
        parts: dict[str, object] = {name: lambda base=base, **kwargs: base for name in names}
        parts |= {"lm_head": lambda x: x.flip(2) * 0.7}
        output = forward(parts, input_ids=rows[None], use_cache=False, logits_to_keep=rows)
        require_same(output.logits, states[:, rows].flip(2) * 0.7 / divisor, "changes its logits")
    halved = MoeModelOutputWithPast(last_hidden_state=waves(1, NUM_TOKENS, 8, phase=0.3).bfloat16())
    parts = {name: lambda **kwargs: halved for name in names} | {"lm_head": lambda x: x}
    dtypes.append(forward(parts, input_ids=rows[None], use_cache=False, logits_to_keep=rows).logits.dtype)
