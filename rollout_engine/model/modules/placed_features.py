"""Features of pictures among the embeddings of a text model: a hook on its decoder puts them there.

    input_ids     7  3  9  9  9  4      9: the placeholder; index -1 -1 0 1 2 -1 into the features

The composite, or the causal LM, is called with ids alone, inside `placing`. Below it the decoder is given embeddings
with the features in them, positions in three axes if the model has these, the features of its first layers, and how far
tokens of a picture see past their own position.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.kernels.attention_params import Reach
from rollout_engine.model.modules.packed_rows import REACH, TOKEN_POSITIONS

_state = threading.local()
_OF_LAYERS = "per_layer_inputs"
"""Argument of decoders whose layers have embeddings of their own."""
_FIRST_KEY = 1 << 40
"""Keys of features begin here, above every token id."""


class PlacedFeatures(NamedTuple):
    """Features of pictures, and their places in a batch [B, T] of token ids."""

    rows: Tensor
    """[M, H], of all different pictures, end to end."""
    deepstack: tuple[Tensor, ...]
    """[M, H] for each of the first layers, to be added behind it; empty in most models."""
    row_of: Tensor
    """int64 [B, T]: which row stands at a position in place of the token's embedding; -1: none."""
    positions: Tensor | None
    """int64 [3, B, T]: rotary positions in time, height and width; None: those of the tokens."""
    reach: Reach | None = None
    """How far tokens [B, T] see past their own position; None: the model's attention is causal."""

    def gather(self, order: Tensor) -> "PlacedFeatures":
        """Those of a batch with other columns: column c of row b is column `order[b, c]` of this one."""
        positions = self.positions
        if positions is not None:
            positions = positions.gather(2, order.expand(3, *order.shape))
        reach = self.reach and self.reach._replace(tokens=self.reach.tokens.gather(1, order))
        return self._replace(row_of=self.row_of.gather(1, order), positions=positions, reach=reach)

    def take(self, tokens: Tensor) -> "PlacedFeatures":
        """Those of a single row of `tokens` int64 [N], numbers of tokens in the flattened batch."""
        positions = self.positions
        if positions is not None:
            positions = positions.flatten(1).index_select(1, tokens)[:, None]
        reach, row_of = self.reach and self.reach.at(tokens), self.row_of.flatten().index_select(0, tokens)[None]
        return self._replace(row_of=row_of, positions=positions, reach=reach)

    def first(self, length: int) -> "PlacedFeatures":
        """Those of the first `length` columns."""
        positions = None if self.positions is None else self.positions[..., :length]
        reach = self.reach and self.reach._replace(tokens=self.reach.tokens[:, :length].contiguous())
        return self._replace(row_of=self.row_of[:, :length], positions=positions, reach=reach)

    def keys(self, input_ids: Tensor) -> Tensor:
        """int64 [B, T]: ids of tokens, and other numbers for features: equal if the rows and how far they see are."""
        of_features = self.row_of + _FIRST_KEY
        if self.reach is not None:
            of_features += self.reach.tokens.long() * (2 * _FIRST_KEY)
        return torch.where(self.row_of < 0, input_ids, of_features)

    def embed(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, T, H] of the tokens -> those with the features in their places."""
        at = self.row_of >= 0
        rows = self.rows.index_select(0, self.row_of[at]).to(embeddings.dtype)
        return embeddings.index_put(at.nonzero(as_tuple=True), rows)


@contextmanager
def placing(features: PlacedFeatures | None) -> Iterator[None]:
    """Inside, this thread's forwards of a decoder with the hook have these features; None: those around it."""
    before = current_features()
    _state.features = before if features is None else features
    try:
        yield
    finally:
        _state.features = before


def place(features: PlacedFeatures | None) -> None:
    """Set the features of this thread's next forwards; None: they have none."""
    _state.features = features


def current_features() -> PlacedFeatures | None:
    """The features of this thread's forwards."""
    features: PlacedFeatures | None = getattr(_state, "features", None)
    return features


class OrdinaryTokens(NamedTuple):
    """Tokens that have their own embeddings, though a composite may take their ids for those of a picture."""

    input_ids: Tensor
    """int64 [B, T]."""
    special: Tensor
    """int64 [n]: ids of placeholders; a policy may have sampled them."""

    def put(self, decoder: Any, kwargs: dict[str, Any], row_of: Tensor | None) -> None:
        """Write the embeddings of those that stand for no feature into the arguments of a decoder.

        `row_of`: as that of `PlacedFeatures`, None: there are no features.
        """
        at = torch.isin(self.input_ids, self.special)
        if row_of is not None:
            at &= row_of < 0
        if not bool(at.any()):
            return
        ids, places = self.input_ids[at], at.nonzero(as_tuple=True)
        kwargs["inputs_embeds"] = kwargs["inputs_embeds"].index_put(places, decoder.get_input_embeddings()(ids))
        if kwargs.get(_OF_LAYERS) is not None:
            own = decoder.get_per_layer_inputs(ids[None])[0]
            kwargs[_OF_LAYERS] = kwargs[_OF_LAYERS].index_put(places, own)


def note_ordinary_tokens(tokens: OrdinaryTokens | None) -> None:
    """Set the tokens of this thread's next forward of a composite; None: they are forgotten."""
    _state.ordinary = tokens


def layer_inputs(decoder: Any, input_ids: Tensor, at: Tensor) -> dict[str, Tensor]:
    """The argument of a decoder whose layers have embeddings of their own (Gemma 4's E2B and E4B); {} for any other.

    `input_ids` [B, T]; at features, by `at` bool [B, T], stands the embedding of padding, as in transformers.
    """
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return {}
    return {_OF_LAYERS: decoder.get_per_layer_inputs(input_ids.masked_fill(at, decoder.config.pad_token_id or 0))}


def take_placed_features(decoder: nn.Module) -> None:
    """Have `decoder`, a Hugging Face text model without its head, take features that are placed; call it once."""
    if _put_features not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_put_features, with_kwargs=True)


def _put_features(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    features = current_features()
    ordinary: OrdinaryTokens | None = getattr(_state, "ordinary", None)
    if features is None and (ordinary is None or kwargs.get("inputs_embeds") is None):
        return None
    kwargs = dict(kwargs)
    if ordinary is not None and kwargs.get("inputs_embeds") is not None:
        ordinary.put(decoder, kwargs, features and features.row_of)
    if features is None:
        return args, kwargs
    ids: Any = args[0] if args else kwargs.get("input_ids")
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        embeddings = decoder.get_input_embeddings()(ids)
        kwargs |= layer_inputs(decoder, ids, features.row_of >= 0)
    kwargs |= dict(input_ids=None, inputs_embeds=features.embed(embeddings))
    if features.reach is not None:
        kwargs[REACH] = features.reach
    if features.positions is not None:
        own = kwargs.get("position_ids")
        if own is None:
            own = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
        kwargs["position_ids"] = torch.cat([own.expand(features.row_of.shape)[None], features.positions])
        kwargs[TOKEN_POSITIONS] = own
    if features.deepstack:
        at = features.row_of >= 0
        rows = [each.index_select(0, features.row_of[at]) for each in features.deepstack]
        kwargs |= dict(visual_pos_masks=at, deepstack_visual_embeds=rows)
    return args[1:] and (None, *args[1:]), kwargs
