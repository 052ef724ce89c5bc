"""The load-time gate: admits an architecture by its computation, not by its name.

    1. static rules          properties that only the configuration shows
    2. structural probe      watches one forward (`geometry.probe_geometry`)
    3. numeric self-check    compares a small copy with large weights with Hugging Face's own forward, near and far
                             (`self_check`)

Each catches faults that the others miss. A model that fails is refused with the reason, never served wrong.
"""

import logging
import time
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.admission import gate_cache
from rollout_engine.model.admission.self_check import check_numerics
from rollout_engine.model.admission.unused_scales import warn_of_unused_scales, without_unused_scales
from rollout_engine.model.modules.composites import (
    PartNames,
    adopt_conversions,
    build_whole,
    part_names,
    text_config_of,
)
from rollout_engine.model.modules.construct import construct
from rollout_engine.model.modules.geometry import LayerGeometry, Refusal, probe_geometry
from rollout_engine.model.modules.indexed_attention import unserved_indexers
from rollout_engine.model.modules.mixers import unserved_mixers
from rollout_engine.model.modules.one_thread import one_thread

logger = logging.getLogger(__name__)

_SERVED_LAYERS = {"full_attention", "sliding_attention", "indexed_attention"}
_SERVED_LAYERS |= {"linear_attention", "conv", "hybrid", "moe", "mlp"}
"""Kinds that configurations name; "linear_attention" is any recurrence, "hybrid" has one next to its attention."""

_PREFIX_LM = (
    " over the whole prompt: keys and values of a token depend on all that is behind it there, so prompts share no "
    "beginning, and a second turn changes those of the first, whose log-probs no trainer gets from one row"
)
"""Why the text of a composite that reads its prompt in both directions (PaliGemma) is not served; decision 0069."""


def text_config_to_serve(config: PretrainedConfig, head: str | None = None) -> PretrainedConfig:
    """The configuration of a composite's text model, which is served; that of any other model itself.

    Raises `ConfigError` if the static rules refuse it; `head` as in `construct`.
    """
    try:
        if (text_config := text_config_of(config)) is not config:
            _check_static(config)
            _check_static(text_config, is_part=True)
            if head is not None:
                raise Refusal("it classifies, and of a composite only a causal text model is served")
            served = without_unused_scales(config, text_config)
            warn_of_unused_scales(config, text_config, served)
            return served
        return text_config
    except Refusal as reason:
        raise _word_refusal(config, reason) from None


def build_module(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    head: str | None = None,
    check: Callable[[PreTrainedModel], None] = lambda module: None,
) -> PreTrainedModel:
    """Construct a module that the static rules allow; `head` and `check` as in `construct`.

    Raises `ConfigError` for a model that is refused or cannot be built.
    """
    try:
        _check_static(config)
        return _construct(config, dtype, attention, head, check)
    except Refusal as reason:
        raise _word_refusal(config, reason) from None


def names_of_parts(config: PretrainedConfig, module: PreTrainedModel) -> PartNames:
    """How names begin in checkpoints of the composite of `config`, whose text model `module` is.

    There are no such beginnings in any other model. Raises `ConfigError` for a composite that cannot be built.
    """
    if config.get_text_config() is config:
        return PartNames([], [])
    try:
        return part_names(build_whole(config), module)
    except Refusal as reason:
        raise _word_refusal(config, reason) from None


def admit(module: PreTrainedModel, whole: PretrainedConfig | None = None) -> list[LayerGeometry]:
    """Check `module`, whose weights may be uninitialised, and return the geometry of its layers.

    `whole`: the configuration of the composite whose text model it is, if it is one: the composite must compute the
    same from text alone.

    Results are cached on disk by architecture, configuration, library versions and our own sources, so the second load
    of an architecture costs a file read. Raises `ConfigError` with the reason of a refusal, which is not cached.
    """
    whole = None if whole is None or whole.get_text_config() is whole else whole
    if whole is not None:
        adopt_conversions(module, whole)
    key = gate_cache.key_of(module, whole)
    if (known := gate_cache.read(key)) is not None:
        return known
    started = time.perf_counter()
    try:
        with one_thread():
            _check_mixers(module)
            _check_indexers(module)
            geometry = probe_geometry(module)
            check_numerics(module, geometry, whole)
    except Refusal as reason:
        raise _word_refusal(whole or module.config, reason) from None
    gate_cache.write(key, geometry)
    logger.info("%s passed the load-time gate in %.2f s.", type(module).__name__, time.perf_counter() - started)
    return geometry


def _check_static(config: PretrainedConfig, *, is_part: bool = False) -> None:
    if config.is_encoder_decoder:
        raise Refusal("it is an encoder-decoder")
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")
    if getattr(config, "is_causal", True) is False or is_bidirectional:
        raise Refusal("its attention is bidirectional" + (_PREFIX_LM if is_part else ""))
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if kinds - _SERVED_LAYERS:
        raise Refusal(
            f"it has layers of kind {', '.join(sorted(kinds - _SERVED_LAYERS))}, and only these are served: "
            f"{', '.join(sorted(_SERVED_LAYERS))}"
        )


def _check_mixers(module: PreTrainedModel) -> None:
    if others := unserved_mixers(module):
        raise Refusal(f"its layers compute over tokens by functions that are not served here: {'; '.join(others)}")


def _check_indexers(module: PreTrainedModel) -> None:
    if others := unserved_indexers(module):
        raise Refusal(f"its attention chooses positions in a way that is not served here: {'; '.join(others)}")


def _construct(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    head: str | None,
    check: Callable[[PreTrainedModel], None],
) -> PreTrainedModel:
    try:
        return construct(config, dtype=dtype, attention=attention, head=head, check=check)
    except ConfigError:
        raise
    except Exception as problem:  # foreign constructors may fail in any way
        kind = "a causal LM" if head is None else f"a classifier ({head}s)"
        raise Refusal(
            f"transformers does not build it as {kind} with our attention ({type(problem).__name__}: {problem})"
        ) from None


def _word_refusal(config: PretrainedConfig, reason: Refusal) -> ConfigError:
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    return ConfigError(f"{name} (model_type '{config.model_type}') cannot be served exactly: {reason}.")
