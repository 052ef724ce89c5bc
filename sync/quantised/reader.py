"""Reads a quantised checkpoint as if it were plain: plain names, and float tensors that are computed when read."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from sync.errors import ManifestMismatch
from sync.manifest import counted, decode_json, first_names
from sync.quantised.awq import Awq
from sync.quantised.compressed_tensors import CompressedTensors
from sync.quantised.fp8 import Fp8
from sync.quantised.gptq import Gptq
from sync.quantised.mxfp4 import Mxfp4
from sync.quantised.tensors import DequantisedTensor, QuantisedFormat, StoredParts
from sync.stored_tensor import StoredTensor

logger = logging.getLogger("sync")

CheckpointTensor: TypeAlias = StoredTensor | DequantisedTensor

FORMATS: dict[str, Any] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""The struct of settings, a `QuantisedFormat`, by `quant_method`."""

_FIELDS = ("quantization_config", "compression_config")
_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
"""Dtypes that are no weights without a scale."""
_NO_SETTINGS = ("quant_method", "modules_to_not_convert", "ignored_layers", "ignore", "targets")
"""Fields about modules: which weights are quantised shows in the tensors that are stored for them."""


def read_format(path: Path, config: bytes) -> QuantisedFormat | None:
    """The format that the content of a config.json names; None for a plain checkpoint.

    Raises `ManifestMismatch`, naming the file and the field, for one that is not read.
    """
    whole = decode_json(config, dict[str, Any], f"{path} is not valid JSON")
    text = whole.get("text_config")
    places = [whole, *([text] if isinstance(text, dict) else [])]
    settings = next((place[field] for place in places for field in _FIELDS if place.get(field)), None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(FORMATS)
        raise ManifestMismatch(
            f"{path}: the checkpoint is quantised (quantization_config), and quant_method {method!r:.80} is not read. "
            f"Read are: {known}. Use a checkpoint of one of these, or the unquantised one."
        )
    try:
        form: QuantisedFormat = msgspec.convert(settings, FORMATS[method])
    except (msgspec.ValidationError, ValueError) as problem:
        raise ManifestMismatch(
            f"{path}: the quantization_config (quant_method '{method}') is not read: {problem}. Use a checkpoint with "
            "other settings, or the unquantised one."
        ) from None
    unknown = sorted(settings.keys() - {*form.__struct_fields__, *_NO_SETTINGS})  # type: ignore[attr-defined]
    if unknown:
        logger.info("%s: not used of the quantization_config: %s", path, first_names(unknown))
    return form


def read_weights(config: Path, form: QuantisedFormat | None, tensors: Sequence[StoredTensor]) -> list[CheckpointTensor]:
    """The weights that the stored tensors denote: float ones as they are, quantised ones to be computed when read.

    `config`: the file that names `form`. Raises `ManifestMismatch`, naming file and tensor, for a weight whose tensors
    are not as the format has them, or whose scale is missing.
    """
    plain = {tensor.name: tensor for tensor in tensors}
    if form is None:
        _refuse_codes(plain, f"{config} has no quantization_config", _FLOAT8)
        return list(tensors)
    quantised: dict[str, dict[str, StoredTensor]] = {}
    for name in list(plain):
        ending = next((ending for ending in form.endings if name.endswith(ending)), None)
        if ending is not None:
            weight = name.removesuffix(ending) + form.endings[ending]
            quantised.setdefault(weight, {})[ending] = plain.pop(name)
    not_used = [name for name in plain if re.search(form.unused, name)]
    for name in not_used:
        del plain[name]
    computed = []
    for name, found in quantised.items():
        parts = StoredParts(name, found | ({"": plain.pop(name)} if name in plain else {}))
        computed.append(DequantisedTensor(name, form.recipe(parts)))
        parts.check_all_taken()
    _refuse_codes(plain, "there is no scale for it", (*_FLOAT8, "I8"))
    logger.info(
        "%s: quantised (%s). %s dequantised in float32 when read, and rounded once to the model's dtype; %s not "
        "quantised. Activations are not quantised%s.",
        *(config, form.describe(), counted(computed, "weight is", "weights are"), counted(plain, "is", "are")),
        f": {len(not_used)} scales of activations are not used" if not_used else "",
    )
    return [*plain.values(), *computed]


def _refuse_codes(plain: dict[str, StoredTensor], why: str, dtypes: tuple[str, ...]) -> None:
    for name, tensor in plain.items():
        if tensor.stored_dtype in dtypes:
            raise ManifestMismatch(f"{tensor.path}: '{name}' is {tensor.stored_dtype}, and {why}.")
