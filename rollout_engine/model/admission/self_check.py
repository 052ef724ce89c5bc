"""The numeric self-check of the gate: our paged forward must compute the same as Hugging Face's own forward.

A small copy of the architecture (few layers, narrow, windows and original lengths of a few tokens, float32) gets
weights so large that a lost softcap, a wrong scale or a window off by one changes the logits; usual initial weights
would hide that. The logits of several sequences, computed in chunks and single tokens over shuffled blocks, are
compared with one eager forward each. Others, all in one step, have their tokens at far positions, across every boundary
that the configuration may name (`modules.positions`): there logits may change with positions, and never with the batch.
"""

import copy
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.composites import adopt_conversions, check_layouts, twin_with
from rollout_engine.model.modules.construct import construct, initialize
from rollout_engine.model.modules.geometry import LayerGeometry, Refusal, probe_geometry
from rollout_engine.model.modules.latent_attention import cache_latents, has_latents
from rollout_engine.model.modules.layer_watch import layers_of
from rollout_engine.model.modules.mixers import mixers_of, swap_mixers
from rollout_engine.model.modules.positions import far_starts
from rollout_engine.model.modules.rotary import rotary_limit
from rollout_engine.model.packing.linear_groups import fuse_projections

TOLERANCE = 3e-4
"""Largest error allowed, relative to the largest logit: round-off stays under 1e-5, faults begin at 3e-3."""

_BLOCK_SIZE = 4
_WINDOW = 8
_LENGTHS = ("original_max_position_embeddings", "floor_scale")
"""Fields from which on positions count otherwise, at any depth of a configuration."""
_LENGTH = 12
_NUM_FAR = 9
"""Tokens of each sequence at far positions."""
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")
"""Attributes that differ in every layer."""
_VOCAB_SIZE = 128
_INTERMEDIATE_SIZE = 96


def check_numerics(
    module: PreTrainedModel, geometry: list[LayerGeometry], whole: PretrainedConfig | None = None
) -> None:
    """Raise `Refusal` unless a small copy of `module`'s architecture computes the same logits both ways.

    `whole`: compare with the composite of this configuration, whose text model `module` is, in place of `module`'s own
    forward. The weights of `module` do not matter.
    """
    twins, starts = _small_twins(module, geometry, whole), far_starts(module.config, _NUM_FAR)
    _check_far_geometry(twins[0], twins[2], starts)
    for place, compare in (("", _relative_error), (" at far positions", partial(_relative_far_error, starts=starts))):
        try:
            with without_advice():
                error = compare(*twins)
        except Exception as problem:  # ours or the module's: either way it cannot run over the paged cache
            raise Refusal(
                f"its forward fails over the paged cache{place} ({type(problem).__name__}: {problem})"
            ) from None
        if not error <= TOLERANCE:
            raise Refusal(
                f"on a small copy its logits{place} differ from transformers' own by {error:.1e} of the largest "
                f"(allowed: {TOLERANCE:.0e})"
            )


@contextmanager
def without_advice() -> Iterator[None]:
    """Inside, transformers does not advise to install packages for its own forwards, which only the check runs."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_far_geometry(engine: PreTrainedModel, near: list[LayerGeometry], starts: list[int]) -> None:
    for start in starts:
        if probe_geometry(engine, start) != near:
            raise Refusal(f"its attention has other parameters from position {start} on")


def _small_twins(
    module: PreTrainedModel, geometry: list[LayerGeometry], whole: PretrainedConfig | None
) -> tuple[PreTrainedModel, PreTrainedModel, list[LayerGeometry]]:
    """Small copies with equal weights: (with our attention, with eager attention and all of `whole`, geometry)."""
    problem: Exception | None = None
    kept = _kept_layers(module, geometry)
    for shrink in (_narrow_config, thin_config, copy.copy):
        try:
            small = shrink(shorten_config(module.config, kept))
            engine = construct(small, dtype=torch.float32, attention=ATTENTION_NAME)
            spread_weights(engine)
            if has_latents(module):
                cache_latents(engine)
            if mixers_of(module):
                swap_mixers(engine)
            small_geometry = probe_geometry(engine)
            reference = _reference(small, engine, whole)
        except Exception as failure:  # foreign configurations may not allow any size
            problem = failure
            continue
        if [_kind(g) for g in small_geometry] == [_kind(geometry[index]) for index in kept]:
            fuse_projections(engine)
            return engine, reference, small_geometry
    if isinstance(problem, Refusal):
        raise problem
    raise Refusal(
        f"no small copy of it could be made to check its numbers ({problem or 'its layers changed with its size'})"
    )


def _reference(small: PretrainedConfig, engine: PreTrainedModel, whole: PretrainedConfig | None) -> PreTrainedModel:
    """A module with the weights of `engine` that computes as transformers does: all of a composite, if it is one."""
    if whole is not None:
        twin = twin_with(whole, engine)
        adopt_conversions(engine, whole)
        check_layouts(twin, engine)
        return twin
    reference = construct(small, dtype=torch.float32, attention="eager")
    reference.load_state_dict(engine.state_dict())
    return reference


def _kept_layers(module: PreTrainedModel, geometry: list[LayerGeometry]) -> list[int]:
    """Layers of a small copy: the first ones, enough to include every kind.

    Of layers that read the keys and values of others, which stand behind these, one of each kind.
    """
    total = len(geometry)
    kinds: list[object] = [_kind(layer) for layer in geometry]
    if layers := layers_of(module, total):
        kinds = list(zip(kinds, map(_settings, layers), strict=True))
    firsts = set(map(kinds.index, kinds))
    read = {layer.kv_layer for layer in geometry if layer.kv_layer is not None}
    return sorted(firsts | read) if read else list(range(min(total, max(2, 1 + max(firsts)))))


def shorten_config(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """A configuration of the layers `kept`, with a small vocabulary, short windows and lengths."""
    small = copy.deepcopy(config)
    total = small.num_hidden_layers
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(small, name, [value[index] for index in kept])
        if name.startswith("vocab_size") and isinstance(value, int):
            setattr(small, name, min(value, _VOCAB_SIZE))
    small.num_hidden_layers = len(kept)
    if getattr(small, "num_kv_shared_layers", None):
        small.num_kv_shared_layers = sum(index >= total - small.num_kv_shared_layers for index in kept)
    if getattr(small, "is_heterogeneous", False):
        overrides = small._heterogeneity_spec.per_layer_overrides
        small.per_layer_config = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
    small.vocab_size = _VOCAB_SIZE
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, 0)
    if getattr(small, "sliding_window", None):
        small.sliding_window = _WINDOW
    if rotary_limit(small) is None:  # the others read no position from there on
        _shorten_lengths(vars(small))
    return small


def _shorten_lengths(fields: dict[str, object]) -> None:
    """Set lengths to `_LENGTH`, so that prompts pass them."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _shorten_lengths(value)
        elif name in _LENGTHS and isinstance(value, int | float):
            fields[name] = _LENGTH


def _narrow_config(config: PretrainedConfig) -> PretrainedConfig:
    """At most two key/value heads and the rest in proportion; head sizes and grouping stay."""
    small = copy.deepcopy(config)
    heads = small.num_attention_heads
    kv_heads = getattr(small, "num_key_value_heads", None) or heads
    fewer = min(kv_heads, 2) * (heads // kv_heads)
    small.hidden_size = small.hidden_size * fewer // heads
    small.num_attention_heads = fewer
    if hasattr(small, "num_key_value_heads"):
        small.num_key_value_heads = min(kv_heads, 2)
    _narrow_states(small, fewer, heads)
    return thin_config(small)


def _narrow_states(small: PretrainedConfig, fewer: int, heads: int) -> None:
    """As many heads of Mamba 2 as the hidden size allows, and two of others with their grouping; head sizes stay."""
    if getattr(small, "mamba_n_heads", None):
        small.mamba_n_heads = small.mamba_n_heads * fewer // heads
        small.mamba_n_groups = min(small.mamba_n_groups, small.mamba_n_heads)
    if getattr(small, "mamba_d_ssm", None):
        small.mamba_d_ssm = small.mamba_n_heads * small.mamba_d_head
    if getattr(small, "linear_num_key_heads", None):
        group = small.linear_num_value_heads // small.linear_num_key_heads
        small.linear_num_key_heads = min(small.linear_num_key_heads, 2)
        small.linear_num_value_heads = small.linear_num_key_heads * group
    if getattr(small, "linear_num_heads", None):
        small.linear_num_heads = min(small.linear_num_heads, 2)


def thin_config(config: PretrainedConfig) -> PretrainedConfig:
    """Narrow MLPs and experts."""
    small = copy.deepcopy(config)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(small, name, None):
            setattr(small, name, min(getattr(small, name), _INTERMEDIATE_SIZE))
    return small


def _kind(layer: LayerGeometry) -> tuple[object, ...]:
    """A layer's geometry without the sizes that a small copy changes."""
    state = None if layer.state is None else layer.state.without_counts()
    if not layer.attends:
        return (state,)
    group = 0 if layer.has_latents else layer.num_heads // layer.num_kv_heads
    windowed = layer.sliding_window is not None
    own = layer.kv_layer is None
    return layer.head_dim_k, layer.head_dim_v, layer.scale, layer.softcap, layer.has_sinks, group, windowed, own, state


def _settings(layer: nn.Module) -> list[object]:
    """Classes and settings of a layer's parts, such as whether it rotates or has experts; not its number."""
    return [
        (path, type(child).__name__, name, value)
        for path, child in layer.named_modules()
        for name, value in sorted(vars(child).items())
        if isinstance(value, bool | int | float | str) and name not in _NUMBERS
    ]


@torch.no_grad()
def spread_weights(module: PreTrainedModel) -> None:
    """Draw matrices with std 4 / sqrt(hidden size), so that scores differ; move vectors by 0.1 from their start."""
    initialize(module)
    generator = torch.Generator().manual_seed(0)
    std = 4.0 / module.config.hidden_size**0.5
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@torch.no_grad()
def _relative_error(engine: PreTrainedModel, reference: PreTrainedModel, geometry: list[LayerGeometry]) -> float:
    longest = max([26] + [layer.sliding_window + 10 for layer in geometry if layer.sliding_window])
    lengths = (longest - 7, 7, longest)
    prompts = [torch.randint(_VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    expected = [reference(input_ids=torch.tensor([p]), use_cache=False).logits[0] for p in prompts]
    computed = [torch.full_like(logits, torch.nan) for logits in expected]
    tables = shuffled_tables(lengths)
    paged = paged_model(engine, geometry, tables)
    for step in _steps(lengths):
        chunks = [SequenceChunk(prompts[s][first:end], first, tables[s], s) for s, first, end in step]
        sizes = [end - first for _, first, end in step]
        for (s, first, end), logits in zip(step, paged.forward(chunks, range(sum(sizes))).split(sizes), strict=True):
            computed[s][first:end] = logits
    wanted = torch.cat(expected)
    return float((torch.cat(computed) - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def _relative_far_error(
    engine: PreTrainedModel, reference: PreTrainedModel, geometry: list[LayerGeometry], *, starts: list[int]
) -> float:
    """Largest relative error of a near sequence and of one from each of `starts` on, computed in one step."""
    starts = [0, *starts]
    tokens = torch.randint(_VOCAB_SIZE, (len(starts), _NUM_FAR), generator=torch.Generator().manual_seed(1))
    expected = [
        reference(input_ids=row[None], position_ids=start + torch.arange(_NUM_FAR)[None], use_cache=False).logits[0]
        for start, row in zip(starts, tokens, strict=True)
    ]
    tables = shuffled_tables((_NUM_FAR,) * len(starts))
    paged = paged_model(engine, geometry, tables)
    chunks = [
        SequenceChunk(row.tolist(), 0, table, s) for s, (row, table) in enumerate(zip(tokens, tables, strict=True))
    ]
    computed = paged.forward(FlatBatch.of(chunks, starts), range(tokens.numel()))
    wanted = torch.cat(expected)
    return float((computed - wanted).abs().max() / wanted.abs().max())


def paged_model(engine: PreTrainedModel, geometry: list[LayerGeometry], tables: list[list[int]]) -> CpuModel:
    """The model over block tables, with a slot of states for each."""
    num_blocks, num_slots = sum(map(len, tables)), len(tables)
    return CpuModel(engine, geometry, num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_state_slots=num_slots)


def shuffled_tables(lengths: tuple[int, ...]) -> list[list[int]]:
    """Block tables of sequences of these lengths, over shuffled blocks."""
    counts = [-(-n // _BLOCK_SIZE) for n in lengths]
    free = random.Random(0).sample(range(sum(counts)), sum(counts))
    return [[free.pop() for _ in range(count)] for count in counts]


def _steps(lengths: tuple[int, ...]) -> Iterator[list[tuple[int, int, int]]]:
    """Per step, (sequence, first, end) of the tokens to compute: uneven chunks, the last three tokens one by one."""
    done = [0] * len(lengths)
    sizes = (5, max(11, max(lengths) // 4), 3)
    step = 0
    while done != list(lengths):
        work = []
        for s, length in enumerate(lengths):
            size = min(sizes[(step + s) % 3], max(1, length - 3 - done[s]))
            if done[s] < length:
                work.append((s, done[s], done[s] + size))
                done[s] += size
        yield work
        step += 1
