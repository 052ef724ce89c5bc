"""Who may be served: an architecture is admitted by what it does, not by its name.

    1. static rules          what only the configuration can tell
    2. structural probe      one forward, watched: `geometry.probe_geometry`
    3. numeric self-check    a small copy under large weights against Hugging Face's own forward: `self_check`

Each layer catches what the others cannot see. What fails is refused with the reason, never served wrong.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.errors import ConfigError
from rollout_engine.model import verdicts
from rollout_engine.model.construct import construct
from rollout_engine.model.geometry import LayerGeometry, Refusal, probe_geometry
from rollout_engine.model.rotary import rotary_limit
from rollout_engine.model.self_check import check_numerics

logger = logging.getLogger(__name__)

_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def build_module(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """`construct`, after the static rules. Raises `ConfigError` for what they refuse and for what cannot be built."""
    try:
        _check_static(config)
        return _construct(config, dtype, attention)
    except Refusal as reason:
        raise _worded(config, reason) from None


def admit(module: PreTrainedModel) -> list[LayerGeometry]:
    """Geometry of `module`'s layers once it has passed; its weights may still be uninitialised.

    A verdict is kept on disk by architecture, configuration, library versions and our own sources, so the second load
    of an architecture costs a file read. Raises `ConfigError` with the reason of a refusal; these are not kept.
    """
    key = verdicts.key_of(module)
    if (known := verdicts.read(key)) is not None:
        return known
    started = time.perf_counter()
    try:
        with _one_thread():
            geometry = probe_geometry(module)
            check_numerics(module.config, geometry)
    except Refusal as reason:
        raise _worded(module.config, reason) from None
    verdicts.write(key, geometry)
    logger.info("%s passed the load-time gate in %.2f s.", type(module).__name__, time.perf_counter() - started)
    return geometry


def position_limit(config: PretrainedConfig) -> int | None:
    """Longest sequence with batch-independent positions; None: the configuration names none."""
    limits = (getattr(config, "max_position_embeddings", None), rotary_limit(config))
    return min((limit for limit in limits if limit), default=None)


def _check_static(config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise Refusal("it is an encoder-decoder")
    if _is_composite(config):
        raise Refusal("its text model is part of a larger one; use a checkpoint of the text model alone")
    if getattr(config, "quantization_config", None):
        raise Refusal("its checkpoint is quantised; use an unquantised one")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        raise Refusal("its attention is bidirectional")
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if kinds - _SERVED_LAYERS:
        raise Refusal(
            f"it has layers of kind {', '.join(sorted(kinds - _SERVED_LAYERS))}, and only these are served: "
            f"{', '.join(sorted(_SERVED_LAYERS))}"
        )


def _is_composite(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # it has several text models
        return True


def _construct(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        return construct(config, dtype=dtype, attention=attention)
    except Exception as problem:  # whatever a foreign constructor does with a foreign attention name
        raise Refusal(
            f"transformers does not build it as a causal LM with our attention ({type(problem).__name__}: {problem})"
        ) from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from more threads, and on a busy machine lose a hundredfold waiting for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worded(config: PretrainedConfig, reason: Refusal) -> ConfigError:
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    return ConfigError(f"{name} (model_type '{config.model_type}') cannot be served exactly: {reason}.")
