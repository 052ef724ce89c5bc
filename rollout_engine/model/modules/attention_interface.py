"""The attention function that Hugging Face modules call: over paged KV inside the engine, dense on a trainer.

Inside `attending(step)` keys and values go to their slots and queries read the block tables; outside, every batch row
is a sequence of its own that starts at position 0 (`rollout_engine.exact`).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.attention_params import AttentionParams, Reach
from rollout_engine.kernels.cpu.attention import ChunkColumns, are_latents
from rollout_engine.kernels.dense_attention import DenseAttention, DenseKernel, TokensAt
from rollout_engine.kernels.indexed_attention import ChosenAttention, ChosenSlots, choose_slots
from rollout_engine.model.modules.geometry import HARMLESS_TENSORS
from rollout_engine.model.modules.indexed_attention import UNMASKED, Index, check_scores
from rollout_engine.model.modules.latent_attention import products_of
from rollout_engine.model.modules.packed_rows import (
    REACH,
    TOKEN_POSITIONS,
    PackedSequences,
    packed_rows_expected,
    packed_sequences,
)
from rollout_engine.model.modules.placed_features import current_features

ATTENTION_NAME = "rollout_engine"
_active = threading.local()


class AttentionStep(Protocol):
    """Attention of one step: writes its keys and values, and computes the outputs of its queries."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv] of the flat batch -> [T, H, Dv].

        In a layer with latents Hk is 1, and v a view of the first channels of k.
        """
        ...


class IndexedStep(AttentionStep, Protocol):
    """Attention of one step in a model whose layers may choose positions."""

    def attend_chosen(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, index: Index
    ) -> Tensor:
        """Do as `attend`, in a layer with latents; queries see the positions that are chosen by `index` alone."""
        ...


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Inside, attention of this thread's forwards is that of `step`."""
    _active.step = step
    try:
        yield
    finally:
        _active.step = None


def current_step() -> AttentionStep | None:
    """The step of this thread, inside `attending`."""
    step: AttentionStep | None = getattr(_active, "step", None)
    return step


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    indices: object = None,
    dense: DenseKernel | None = None,
    step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: q [B, H, T, D], k and v [B, Hk, T, D] -> ([B, T, H, Dv], None).

    Outside a step, `position_ids` that start again within a row mark packed sequences (`model.packed_rows`).
    `s_aux` [H] are attention sinks. `indices`: the `Index` by which queries choose positions. `dense`: computes outside
    a step, unless on the CPU. `step`: who attends, whether this thread is in a step or not.
    """
    has_mask = attention_mask is not None and attention_mask is not UNMASKED
    if has_mask or not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} asks for a mask of its own or bidirectional attention: not served.")
    if dropout:
        raise ConfigError(
            f"{type(module).__name__} drops attention weights at random (p={dropout}), which no engine does. Load the "
            "model with attention_dropout=0.0, or call model.eval()."
        )
    positions, reach = kwargs.pop(TOKEN_POSITIONS, kwargs.get("position_ids")), kwargs.pop(REACH, None)
    _check_strangers(module, kwargs | ({} if isinstance(indices, Index) else dict(indices=indices)))
    index = indices if isinstance(indices, Index) else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale, sliding_window or 0, softcap or 0.0)
    step = step or current_step()
    latents = products_of(module, key, value)
    if index is not None:
        check_scores(module, index, plain=params == AttentionParams(scale) and s_aux is None and latents is not None)
    if latents is not None:
        query = latents.absorb(query)
    if step is None:
        positions = positions if index is None else index.positions
        seen = _checked_reach(module, reach, params)
        out = _attend_rows(module, query, key, value, params, s_aux, dense, positions, index, seen)
    else:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = _attend_step(step, module, q, k, v, params, s_aux, index).unsqueeze(0)
    return out if latents is None else latents.expand(out), None


def _check_strangers(module: nn.Module, given: dict[str, Any]) -> None:
    strangers = [name for name, each in given.items() if isinstance(each, Tensor) and name not in HARMLESS_TENSORS]
    if strangers:
        raise ConfigError(f"{type(module).__name__} passes {', '.join(strangers)} to attention: not supported.")


def _checked_reach(module: nn.Module, reach: Reach | None, params: AttentionParams) -> Tensor | None:
    """How far queries of a trainer's batch see past their own position in a layer, int32 [B, T]; None: no farther.

    Raises `ConfigError` if the batch has pictures whose tokens see one another, and the layer was not told.
    """
    features = current_features()
    if reach is None and features is not None and features.reach is not None:
        raise ConfigError(
            f"{type(module).__name__} was not given {REACH}, so tokens of a picture would not see all of it: its "
            "layers do not pass it on. Train on text alone."
        )
    return None if reach is None else reach.of(params)


def _attend_step(
    step: Any,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    sinks: Tensor | None,
    index: Index | None,
) -> Tensor:
    """Attention of a step: q [T, H, Dk], k [T, Hk, Dk], v [T, Hk, Dv] -> [T, H, Dv]."""
    layer: Any = module.layer_idx
    if index is not None:
        chosen: Tensor = step.attend_chosen(layer, q, k, v, params, index)
        return chosen
    out: Tensor = step.attend(layer, q, k, v, params, sinks)
    return out


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    sinks: Tensor | None,
    dense: DenseKernel | None,
    position_ids: Tensor | None,
    index: Index | None,
    reach: Tensor | None = None,
) -> Tensor:
    """Attention of whole sequences: q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv] -> [B, T, H, Dv]."""
    packed = _packed(module, query, key, position_ids)
    chosen = None if index is None else index.choose_slots(partial(_choose_in_rows, packed=packed))
    if chosen is not None:
        q, keys, values = query.transpose(1, 2).flatten(0, 1), key[:, 0].flatten(0, 1), value[:, 0].flatten(0, 1)
        found: Tensor = ChosenAttention.apply(q, keys, values, chosen, params).unflatten(0, (len(query), -1))
        return found
    if packed is None or packed.tokens is None or packed.places is None:
        lengths = None if packed is None else packed.lengths
        found = DenseAttention.apply(query, key, value, params, sinks, dense, lengths, reach)
        return found
    shared = are_latents(key, value)
    query, key = (TokensAt.apply(x, packed.tokens) for x in (query, key))
    value = key[..., : value.shape[-1]] if shared else TokensAt.apply(value, packed.tokens)
    reach = None if reach is None else reach.flatten().index_select(0, packed.tokens)[None]
    out: Tensor = DenseAttention.apply(query, key, value, params, sinks, dense, packed.lengths, reach)
    return out.index_select(1, packed.places)


def _choose_in_rows(index: Index, packed: PackedSequences | None) -> ChosenSlots | None:
    """The tokens of the batch that each token attends to; None if no sequence is longer than the index chooses."""
    batch, length, *_ = index.q.shape
    lengths = [length] * batch if packed is None else packed.lengths
    if max(lengths) <= index.topk:
        return None
    keys, columns = index.keys.reshape(batch * length, 1, -1), _columns_of_rows(lengths, packed, batch * length)
    q, weights = index.q.flatten(0, 1), index.weights.flatten(0, 1)
    return choose_slots(q, weights, keys, columns, topk=index.topk, scale=index.scale)


def _columns_of_rows(lengths: Sequence[int], packed: PackedSequences | None, num_tokens: int) -> ChunkColumns:
    """The tokens of a trainer's batch as a flat batch over a pool of single positions, which are these tokens."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    if packed is None or packed.tokens is None or packed.places is None:
        blocks = np.arange(num_tokens, dtype=np.int32)
        return ChunkColumns(np.zeros(len(lengths), np.int64), ends, blocks, ends[:-1])
    places = packed.places.numpy()
    owners = np.searchsorted(ends, places, side="right") - 1
    starts = np.searchsorted(owners, np.arange(len(lengths) + 1))
    first_positions = places[starts[:-1]] - ends[:-1]
    return ChunkColumns(first_positions, starts, packed.tokens.numpy().astype(np.int32), ends[:-1])


class PositionsMissingError(ConfigError):
    """A model does not pass positions to its attention, so packed sequences cannot be separated."""


def _packed(module: nn.Module, query: Tensor, key: Tensor, position_ids: Tensor | None) -> PackedSequences | None:
    """The packed sequences of a trainer's batch, None if every row is one."""
    batch, _, length, _ = query.shape
    if key.shape[2] != length:
        raise ConfigError(
            f"{type(module).__name__} was given {length} queries for {key.shape[2]} keys, but an exact model computes "
            "whole sequences. Pass use_cache=False, or generate with the engine."
        )
    if position_ids is None and packed_rows_expected():
        raise PositionsMissingError(
            f"{type(module).__name__} does not hand position_ids to attention, so packed rows would see one another. "
            "Give this model one sequence a row."
        )
    if position_ids is not None and position_ids.dim() == 3:  # of three axes, which are equal for text
        if bool((position_ids != position_ids[:1]).any()):
            raise PositionsMissingError(
                f"{type(module).__name__} hands attention positions on three axes alone, so tokens of a picture would "
                f"be taken for sequences: its layers do not pass on {TOKEN_POSITIONS}. Train on text alone."
            )
        position_ids = position_ids[0]
    return packed_sequences(position_ids, batch, length)


AttentionInterface.register(ATTENTION_NAME, rollout_attention)
