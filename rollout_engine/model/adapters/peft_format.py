"""Reads LoRA adapters in the format of the package peft: a configuration, and tensors by name. Pickles are not read.

    adapter_config.json           r, lora_alpha, use_rslora, rank_pattern, alpha_pattern
    adapter_model.safetensors     base_model.model.{linear}.lora_A.weight [rank, in], ...lora_B.weight [out, rank]

A setting of the configuration that is not computed here is refused by its name.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.model.adapters.name_patterns import PatternError, name_pattern
from sync.checkpoint import read_tensor_file
from sync.errors import SyncError
from sync.own_files import read_regular

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_STEPS = 1 << 25
"""Most steps to match all patterns of an adapter with all names: some seconds."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<linear>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
_REFUSED = {
    "alora_invocation_tokens": "an activated LoRA depends on the tokens before",
    "arrow_config": "the adapters of Arrow are mixed by the input",
    "fan_in_fan_out": "its matrices are those of transposed layers",
    "kasa_config": "it removes small singular values of the base's weights",
    "layer_replication": "it changes the model's layers",
    "lora_bias": "it trains biases beside its matrices",
    "megatron_config": "its layers are Megatron's",
    "monteclora_config": "its matrices are drawn",
    "modules_to_save": "it replaces whole modules",
    "target_parameters": "it adapts parameters that are no linear layers",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "DoRA divides by norms of the base's weights",
    "use_qalora": "QALoRA pools its inputs",
}
"""Option -> why an adapter that sets it is not served."""
_STARTS = ("eva", "gaussian", "mica", "orthogonal")
"""Values of init_lora_weights, besides bools, that leave the base's weights as they are."""


class LinearAdapter(NamedTuple):
    """The matrices of one linear layer: it adds scale * x @ a.T @ b.T."""

    a: Tensor
    """[rank, in_features]."""
    b: Tensor
    """[out_features, rank]."""
    scale: float


def read_adapter(request: LoRARequest) -> dict[str, LinearAdapter]:
    """The matrices of an adapter by the name of the linear. Raises `RequestError` if it cannot be served."""
    config, tensors = _values(request)
    _check_config(config)
    pairs = _pairs(tensors)
    _check_patterns(config, pairs)
    return {name: _linear(name, config, *pair) for name, pair in pairs.items()}


@contextmanager
def naming_adapter(request: LoRARequest) -> Iterator[None]:
    """Have the `RequestError` of a block name the adapter that it refuses, and its source."""
    try:
        yield
    except RequestError as problem:
        if not request.has_values or (request.path is not None and request.path in str(problem)):
            raise  # the error names the path
        source = "from memory" if request.path is None else f"from {request.path}"
        text = f"{problem} That was adapter '{request.name}' {source}."
        raise RequestError(text, field=problem.field, value=problem.value, bound=problem.bound) from None


def copied(request: LoRARequest) -> LoRARequest:
    """The same adapter with its own copy of the values in memory. Raises `RequestError`."""
    with naming_adapter(request):
        config, tensors = _values(request)
        _check_config(config)
        _pairs(tensors)
    own = tensors if request.path is not None else {name: each.detach().cpu().clone() for name, each in tensors.items()}
    return LoRARequest(request.name, tensors=own, revision=request.revision, config=config)


def _values(request: LoRARequest) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The configuration and the tensors by name, read from its directory if it has one."""
    if request.path is not None:
        return _read_config(Path(request.path)), dict(_read_tensors(Path(request.path)))
    if request.tensors is None:
        bound = "given, or tensors with config"
        hint = f"The engine has no values of '{request.name}'."
        if "/" in request.name:
            hint += f" To read it from that directory, give LoRARequest('NAME', path='{request.name}')."
        raise RequestError.for_field("path", None, bound, hint)
    if request.config is None:
        hint = "Give what adapter_config.json says, such as peft_model.peft_config['default'], or {'lora_alpha': 16}."
        raise RequestError.for_field("config", None, "given with tensors", hint)
    return request.config, request.tensors


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        return msgspec.json.decode(read_regular(path, _MAX_CONFIG_BYTES), type=dict[str, Any])
    except OSError as problem:
        raise _unreadable(path, f"cannot be read ({problem.strerror or problem})") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise _unreadable(path, f"is no configuration of an adapter ({problem})") from None


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / TENSORS_FILE
    try:
        return {stored.name: stored.materialize() for stored in read_tensor_file(path)}
    except (OSError, SyncError) as problem:
        if (directory / "adapter_model.bin").exists():
            raise _unreadable(path, "is not there, and pickles (adapter_model.bin) are not read") from None
        raise _unreadable(path, f"cannot be read ({problem})") from None


def _unreadable(path: Path, what: str) -> RequestError:
    text = f"add_lora: {path} {what}. Give the directory that save_pretrained of a PeftModel has written."
    return RequestError(text, field="path", value=str(path.parent), bound="the directory of an adapter")


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise RequestError.for_field("config.peft_type", kind, "'LORA'", "Merge other adapters: merge_and_unload().")
    for name, reason in _REFUSED.items():
        if config.get(name):
            hint = f"It is not computed here: {reason}. Merge the adapter: merge_and_unload()."
            raise RequestError.for_field(f"config.{name}", config[name], "absent", hint)
    if config.get("bias", "none") != "none":
        hint = "Biases that were trained beside an adapter are the base model's own: send them by update_weights."
        raise RequestError.for_field("config.bias", config["bias"], "'none'", hint)
    start = config.get("init_lora_weights")
    if start is not None and not isinstance(start, bool) and str(start).lower() not in _STARTS:
        bound = f"a bool, {', '.join(map(repr, _STARTS))}, which leave the base's weights alone"
        hint = (
            "Others, such as PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA, change the base, and the engine has the unchanged "
            "one. Convert the adapter, after which true stands here: peft_model.save_pretrained(PATH, "
            "path_initial_model_for_weight_conversion=PATH_OF_THE_START)."
        )
        raise RequestError.for_field("config.init_lora_weights", start, bound, hint)
    if not isinstance(config.get("use_rslora") or False, bool):
        hint = "It decides whether lora_alpha is divided by the rank or by its root."
        raise RequestError.for_field("config.use_rslora", config["use_rslora"], "a bool", hint)
    for name in _PATTERNS:
        if not isinstance(config.get(name) or {}, Mapping):
            raise RequestError.for_field(f"config.{name}", config[name], "a dict of names and numbers")


def _pairs(tensors: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Linear -> (A, B)."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(str(name))
        if match is None:
            bound = "the name of a matrix lora_A or lora_B of a linear layer"
            hint = "Nothing else of an adapter is computed here."
            if ".base_layer." in str(name) or ".lora_embedding_" in str(name):
                hint += " It adapts an embedding or the head, so merge it: merge_and_unload()."
            raise RequestError.for_field("tensors", name, bound, hint)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != 2:
            shown = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RequestError.for_field(f"tensors['{name}']", shown, "a tensor of floats of two dimensions")
        matrices = found.setdefault(match["linear"], {})
        if match["matrix"] in matrices:
            raise RequestError.for_field("tensors", name, f"the only lora_{match['matrix']} of '{match['linear']}'")
        matrices[match["matrix"]] = tensor
    if not found:
        raise RequestError.for_field("tensors", [], "at least one pair of lora_A and lora_B")
    return dict(_complete(found))


def _complete(found: Mapping[str, dict[str, Tensor]]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    for linear, matrices in found.items():
        if len(matrices) < 2:
            missing = "AB".replace(next(iter(matrices)), "")
            raise RequestError.for_field("tensors", linear, f"given with its lora_{missing} too")
        yield linear, (matrices["A"], matrices["B"])


def _check_patterns(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse patterns that are not read, and such as take too long to match with all names."""
    num_chars, num_steps = sum(map(len, names)), 0
    for option in _PATTERNS:
        for pattern in config.get(option) or {}:
            try:
                num_steps += name_pattern(str(pattern)).num_states * num_chars
                if num_steps > _MAX_STEPS:
                    raise PatternError("with those before it, it takes too long to match with all names")
            except PatternError as problem:
                hint = "Name the module as peft does: 'q_proj' or 'layers.3.mlp.down_proj'."
                raise RequestError.for_field(f"config.{option}", pattern, f"a pattern ({problem})", hint) from None


def _linear(name: str, config: Mapping[str, Any], a: Tensor, b: Tensor) -> LinearAdapter:
    rank = len(a)
    if b.shape[1] != rank or not rank:
        shapes = f"lora_A {list(a.shape)}, lora_B {list(b.shape)}"
        raise RequestError.for_field(f"tensors of '{name}'", shapes, "[rank, in_features] and [out_features, rank]")
    field, stated = _of_pattern(config, "rank_pattern", name, "r", rank)
    if stated != rank:
        raise RequestError.for_field(field, stated, f"{rank}, the rank of the tensors of '{name}'")
    field, alpha = _of_pattern(config, "alpha_pattern", name, "lora_alpha", None)
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not math.isfinite(alpha):
        hint = f"It scales '{name}', divided by the rank."
        raise RequestError.for_field(field, alpha, "a finite number", hint)
    return LinearAdapter(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(config: Mapping[str, Any], option: str, name: str, fallback: str, default: Any) -> tuple[str, Any]:
    """The entry that fits a linear's name, as peft looks it up, and its value: of the first pattern, or `fallback`."""
    for pattern, value in (config.get(option) or {}).items():
        if name_pattern(str(pattern)).fits(name):
            return f"config.{option}['{pattern}']", value
    return f"config.{fallback}", config.get(fallback, default)
