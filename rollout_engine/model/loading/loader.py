"""Loads a Hugging Face module: builds and admits it, fills every weight, and collects the engine's data about it."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.locations import find_directory
from rollout_engine.model.admission.gate import admit, build_module, names_of_parts, text_config_to_serve
from rollout_engine.model.admission.tower_trial import tower_refusal
from rollout_engine.model.loading.checkpoint import as_config_errors, read_entries
from rollout_engine.model.loading.configuration import make_size_check, read_config, read_json
from rollout_engine.model.loading.cut_model import cut_whole, divide_whole
from rollout_engine.model.loading.picture_tower import join_parts, load_tower, table_of
from rollout_engine.model.loading.sharded_state import ShardedState
from rollout_engine.model.loading.tower_files import with_tower_names
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.composites import PICTURES, PartNames, adopt_conversions
from rollout_engine.model.modules.construct import initialize, place_on
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.heads import HeadKind, check_head, head_kind_of, with_labels
from rollout_engine.model.modules.indexed_attention import has_indexers, index_attention
from rollout_engine.model.modules.latent_attention import cache_latents
from rollout_engine.model.modules.loaded_model import LoadedModel, ModelFiles
from rollout_engine.model.modules.mixers import is_mixer, swap_mixers
from rollout_engine.model.modules.positions import position_limit
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.model.packing.module_types import tensor_of
from rollout_engine.model.pictures.tower import build_tower
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.seat import Seat
from sync.checkpoint_names import CheckpointNames
from sync.file_snapshot import SnapshotFile
from sync.quantised.reader import CheckpointTensor
from sync.stored_tensor import StoredTensor

logger = logging.getLogger(__name__)

_GENERATION_FILE = "generation_config.json"
_CPU = torch.device("cpu")
_DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED_FLOATS = (*_DEVICE_DTYPES, torch.float64)
_OF_OLD_RELEASES = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Stored by old versions of transformers; computed now."""
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""Ends of names in composites."""


def load_model(
    config: EngineConfig, device: torch.device = _CPU, seat: Seat | None = None, group: ExpertGroup | None = None
) -> LoadedModel:
    """Load `config.model` on `device`. Raises `ConfigError` for whatever cannot be served exactly.

    `seat`: load this rank's part alone; with load_format="dummy" it has all for a moment. `group`: divides experts.
    """
    is_dummy = config.load_format == "dummy"
    directory = find_directory(config.model, weights=not is_dummy)
    hf_config, config_file = read_config(directory)
    state = _read_state(config, directory, config_file)
    entries = read_entries(directory) if config.load_format == "auto" else []
    dtype = _resolve_dtype(config.dtype if state is None else state.dtype, hf_config, entries, device)
    head_kind = head_kind_of(hf_config)
    text_config = _text_config(hf_config, head_kind, entries, state)
    _check_head_place(head_kind, device, seat)
    check_size = make_size_check(directory, text_config, entries)
    module = build_module(text_config, dtype, ATTENTION_NAME, head_kind, check_size)
    limit = _find_limit(module.config, config.max_model_len)
    geometry = _admit(module, hf_config, device, has_ranks=seat is not None)
    vocab_size = len(tensor_of(module.get_output_embeddings() or module.get_input_embeddings()))
    if seat is None:
        _place_whole(module, device)
    tower, picture_info = load_tower(config, hf_config, dtype, device, check_size)
    table = table_of(module, tower)
    names = _checkpoint_names(module, hf_config, tower)
    cut, targets = None, table.views
    if is_dummy:
        initialize(module)
    if seat is not None:
        cut = cut_whole(module, tower, geometry, seat, table, device, keep_values=is_dummy)
    elif group is not None:
        cut = divide_whole(module, tower, head_kind, geometry, group, table, keep_values=is_dummy)
    if cut is not None:
        geometry, targets = cut.geometry, {name: part.view for name, part in cut.parts.items() if part.view.numel()}
    if state is not None:
        _load_state(state, directory, 0 if seat is None else seat.team.rank, cut, _each_once(table, targets))
    elif not is_dummy:
        table.load(with_tower_names(entries, table, names, tower), names, parts=cut and cut.parts)
    with as_config_errors():
        config_file.check()
    _check_head(module, head_kind)
    return LoadedModel(
        module=module,
        dtype=dtype,
        stored_dtype=_stored_dtype(hf_config, entries),
        geometry=geometry,
        eos_token_ids=_read_eos_token_ids(directory, hf_config, text_config),
        max_model_len=_served_length(limit, config.max_model_len),
        vocab_size=vocab_size,
        targets=targets,
        aliases=table.aliases(),
        names=names,
        files=ModelFiles(directory, xxhash.xxh3_128_hexdigest(config_file.content())),
        head_kind=head_kind,
        cut=cut,
        tower=tower,
        picture_info=picture_info,
    )


def _admit(
    module: PreTrainedModel, hf_config: PretrainedConfig, device: torch.device, *, has_ranks: bool
) -> list[LayerGeometry]:
    """Check a module as it will compute, and return the geometry of its layers. Raises `ConfigError`.

    Ranks on devices cache keys and values that latents are expanded to.
    """
    if device != _CPU and has_ranks and any(map(is_mixer, module.modules())):
        raise ConfigError(
            f"{type(module).__name__} has layers that keep a state, which one device computes. Leave "
            "tensor_parallel_size out, or use device='cpu'."
        )
    swap_mixers(module)
    if has_indexers(module):
        _check_indexed(device, has_ranks=has_ranks)
    if device == _CPU or not has_ranks:
        cache_latents(module)
        index_attention(module)
    return admit(module, hf_config)


def _check_indexed(device: torch.device, *, has_ranks: bool) -> None:
    """Raise `ConfigError` if a model with indexers is to run elsewhere than on the CPU in one process."""
    if device != _CPU:
        raise ConfigError("A model that attends to positions chosen by an indexer runs on CPUs only. Use device='cpu'.")
    if has_ranks:
        raise ConfigError(
            "tensor_parallel_size: a model that attends to positions chosen by an indexer is served by one process. "
            "Leave tensor_parallel_size out, and pipeline_parallel_size."
        )


def load_trainable(name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal LM of a checkpoint with the weights that `load_model` gives an engine, for a trainer: with gradients.

    Of a composite it is the whole if pictures are computed exactly, and its text model alone if not. `name`: a
    directory or hub id. `dtype`: as `EngineConfig.dtype`. Raises `ConfigError` as `load_model` does.
    """
    directory = find_directory(name, weights=True, field="path")
    hf_config, config_file = read_config(directory)
    if (head_kind := head_kind_of(hf_config)) is not None:
        raise ConfigError(f"{directory} has a head that classifies each {head_kind}: load a causal LM.")
    entries = read_entries(directory)
    text_config = _text_config(hf_config, None, entries, None)
    check = make_size_check(directory, text_config, entries)
    module = build_module(text_config, _resolve_dtype(dtype, hf_config, entries, device), "eager", check=check)
    if text_config is not hf_config:
        adopt_conversions(module, hf_config)
    tower = None
    if text_config is not hf_config and device == _CPU and not tower_refusal(hf_config):
        tower = build_tower(hf_config, module.dtype, check, fuses=False)
    table, names = table_of(module, tower), _checkpoint_names(module, hf_config, tower)
    table.load(with_tower_names(entries, table, names, tower), names)
    with as_config_errors():
        config_file.check()
    if tower is not None:
        module = join_parts(hf_config, module, tower)
    if os.path.lexists(directory / _GENERATION_FILE):
        _read_eos_token_ids(directory, hf_config, text_config)
        try:
            module.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except Exception as problem:  # transformers raises many kinds of errors here
            raise ConfigError(f"{directory / _GENERATION_FILE} cannot be read: {problem}") from problem
    module.to(device)  # type: ignore[arg-type]  # transformers types it as of a module alone
    return module.requires_grad_(True)


def find_geometry(name: str, dtype: torch.dtype) -> tuple[PretrainedConfig, list[LayerGeometry]]:
    """The configuration of a checkpoint's text model, and its layers as a CPU computes them, without its weights.

    `name`: a directory, GGUF file or hub id; its configuration is enough. Raises `ConfigError` as `load_model` does.
    """
    directory = find_directory(name, weights=False)
    hf_config, _ = read_config(directory)
    module = build_module(text_config_to_serve(hf_config), dtype, ATTENTION_NAME)
    return module.config, _admit(module, hf_config, _CPU, has_ranks=False)


def _read_state(config: EngineConfig, directory: Path, config_file: SnapshotFile) -> ShardedState | None:
    """The state that a sharded directory describes; None for another kind of directory."""
    if config.load_format != "sharded":
        return None
    state = ShardedState.read(directory, config.tensor_parallel_size, config.pipeline_parallel_size)
    with as_config_errors():
        state.check_description(directory, config_file.content())
    state.check_dtype(config.dtype)
    return state


def _place_whole(module: PreTrainedModel, device: torch.device) -> None:
    """Move a module that one process has whole to its device, and fuse its projections."""
    if device != _CPU:
        place_on(module, device)
    fuse_projections(module)


def _check_head(module: PreTrainedModel, head_kind: HeadKind | None) -> None:
    if head_kind is not None:
        check_head(module, head_kind)


def _load_state(
    state: ShardedState, directory: Path, rank: int, cut: ModelCut | None, targets: Mapping[str, Tensor]
) -> None:
    """Fill a rank's weights from its files of a sharded state."""
    state.check_cut(directory, has_columns=cut is not None and bool(cut.columns))
    state.load(directory, rank, targets)


def _each_once(table: WeightTable, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `targets` by the module's own names; tied ones by the first."""
    return {name: targets[name] for name in dict.fromkeys(table.owners.values()) if name in targets}


def _text_config(
    hf_config: PretrainedConfig, head_kind: HeadKind | None, entries: list[CheckpointTensor], state: ShardedState | None
) -> PretrainedConfig:
    """The configuration of the model that is served: of a composite its text model's."""
    text_config = text_config_to_serve(with_labels(hf_config), head_kind)
    if text_config is not hf_config:
        text_config.tie_word_embeddings = _ties_head(hf_config, text_config, entries, state)
    return text_config


def _ties_head(
    hf_config: PretrainedConfig,
    text_config: PretrainedConfig,
    entries: Iterable[CheckpointTensor],
    state: ShardedState | None,
) -> bool:
    """Whether `from_pretrained` ties the head of a composite to its embedding.

    The whole's configuration decides, whose default is often to tie them, unless the checkpoint has both and they
    differ. A sharded state has tied weights once.
    """
    is_tied = bool(getattr(hf_config, "tie_word_embeddings", getattr(text_config, "tie_word_embeddings", False)))
    if state is not None:
        names = {spec.name for shard in state.shards for spec in shard.tensors}
        return is_tied and not any(name.endswith(_HEAD) for name in names)
    heads, embeddings = ([each for each in entries if each.name.endswith(end)] for end in (_HEAD, _EMBEDDING))
    if is_tied and len(heads) == len(embeddings) == 1:
        with as_config_errors():
            is_tied = torch.equal(heads[0].materialize(), embeddings[0].materialize())
    return is_tied


def _check_head_place(head_kind: HeadKind | None, device: torch.device, seat: Seat | None) -> None:
    if head_kind is not None and device != _CPU:
        raise ConfigError(
            "A checkpoint with a head that classifies is served on a CPU only: use device='cpu', or load a causal LM."
        )
    if head_kind is not None and seat is not None:
        option = "tensor_parallel_size" if seat.pipe is None else "pipeline_parallel_size"
        raise ConfigError(
            f"{option}: a checkpoint with a head that classifies is served by one process. Leave {option} out."
        )


def _resolve_dtype(
    asked: str, hf_config: PretrainedConfig, entries: Iterable[CheckpointTensor], device: torch.device
) -> torch.dtype:
    if device.type != "cpu":
        return _dtype_on_device(asked, hf_config, entries)
    if asked == "float16":
        raise ConfigError(
            "dtype='float16' is not served on a CPU: use 'float32', which holds float16 weights as they are, or "
            "'bfloat16'; and dtype=torch.float32 or torch.bfloat16 on the trainer."
        )
    if asked != "auto":
        return torch.float32 if asked == "float32" else torch.bfloat16
    stored = _stored_dtype(hf_config, entries)
    dtype = torch.bfloat16 if stored == torch.bfloat16 and _has_native_bfloat16() else torch.float32
    if dtype != stored and stored is not None:
        logger.info(
            "dtype='auto': the checkpoint's %s is served as %s on this CPU. An exact trainer loads it with dtype=%s.",
            stored,
            dtype,
            dtype,
        )
    return dtype


def _dtype_on_device(asked: str, hf_config: PretrainedConfig, entries: Iterable[CheckpointTensor]) -> torch.dtype:
    chosen = getattr(torch, asked) if asked != "auto" else _stored_dtype(hf_config, entries)
    return chosen if chosen in _DEVICE_DTYPES else torch.bfloat16


def _stored_dtype(hf_config: PretrainedConfig, entries: Iterable[CheckpointTensor]) -> torch.dtype | None:
    stored = hf_config.dtype or _first_float_dtype(entries)
    return getattr(torch, stored) if isinstance(stored, str) else stored


def _first_float_dtype(entries: Iterable[CheckpointTensor]) -> torch.dtype | None:
    return next((e.dtype for e in entries if isinstance(e, StoredTensor) and e.dtype in _STORED_FLOATS), None)


def _has_native_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _find_limit(hf_config: PretrainedConfig, asked: int | None) -> int | None:
    """The result of `position_limit`. Raises `ConfigError` if more positions are asked for."""
    limit = position_limit(hf_config)
    if limit is None:
        return None
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is not allowed: this checkpoint serves exactly up to {limit} positions, its "
            "original length. Lower it, or leave it out."
        )
    if asked is None and limit < hf_config.max_position_embeddings:
        logger.warning(
            "Positions past %d are not served, though the checkpoint names %d: there, the rotary frequencies of all "
            "tokens depend on the longest row of their batch.",
            limit,
            hf_config.max_position_embeddings,
        )
    return limit


def _served_length(limit: int | None, asked: int | None) -> int:
    """Most positions served: the checkpoint's own limit, or `asked` if it has none.

    Call it after `admit`, whose refusals take precedence. Raises `ConfigError` if there is neither.
    """
    if limit is not None:
        return limit
    if asked is None:
        raise ConfigError(
            "The checkpoint's configuration does not say how long a sequence may be (it has no "
            "max_position_embeddings): pass max_model_len, for example max_model_len=2048."
        )
    return asked


def _read_eos_token_ids(directory: Path, hf_config: PretrainedConfig, text_config: PretrainedConfig) -> list[int]:
    path = directory / _GENERATION_FILE
    found = None
    if os.path.lexists(path):
        with as_config_errors():
            found = read_json(SnapshotFile(path)).get("eos_token_id")
    if found is None:
        configs = (hf_config, text_config)
        found = next((ids for each in configs if (ids := getattr(each, "eos_token_id", None)) is not None), None)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{path}: eos_token_id={found!r} is not allowed: must be a token id or a list of them.")
    return ids


def _checkpoint_names(
    module: PreTrainedModel, hf_config: PretrainedConfig, tower: PreTrainedModel | None = None
) -> CheckpointNames:
    """The names that `from_pretrained` accepts for `module` and does not use, and the prefix that it adds.

    `hf_config`: that of the checkpoint, which may be a composite's whose text model `module` is. `tower`: its other
    parts, if they are served: tensors of these have names of theirs then.
    """
    unused = [*_OF_OLD_RELEASES, *(module._keys_to_ignore_on_load_unexpected or ())]
    models = () if tower is None else (each for each in tower.modules() if isinstance(each, PreTrainedModel))
    unused += [pattern for each in models for pattern in each._keys_to_ignore_on_load_unexpected or ()]
    num_layers, num_drafting = (
        getattr(module.config, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    if num_drafting:  # stored behind the model's own layers, as DeepSeek and GLM do, or in a list of their own, as MiMo
        numbers = "|".join(map(str, range(num_layers, num_layers + num_drafting)))
        unused += [rf"(^|\.)layers\.({numbers})\.", r"(^|\.)mtp_layers\.\d+\."]
    parts = names_of_parts(hf_config, module)
    if tower is not None:
        parts = PartNames([*parts.text, ("", f"{PICTURES}.")], [])
    return CheckpointNames(module.base_model_prefix, sorted(set(unused)), parts.text, parts.others)
