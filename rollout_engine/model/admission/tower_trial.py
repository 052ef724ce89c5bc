"""The trial of a composite's pictures, for engines and trainers alike: they must equal those of transformers.

A small copy (few layers of text and tower, widths as they are, float32) encodes random pictures, and computes prompts
with them in chunks over paged KV. Features and logits are compared with those of transformers' own forward of the
whole. A tower whose forward has a product that is not ours, whose bits could depend on the number of threads, is
refused. Which layers let tokens of a picture see one another in both directions is found by trying: none, all, or
those with a sliding window.
"""

import copy
import inspect
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from rollout_engine.base.pictures import Picture, PictureAttention, PlacedPicture, end_between_pictures
from rollout_engine.model.admission import gate_cache
from rollout_engine.model.admission.self_check import (
    TOLERANCE,
    paged_model,
    shorten_config,
    shuffled_tables,
    spread_weights,
    thin_config,
    without_advice,
)
from rollout_engine.model.admission.unused_scales import without_unused_scales
from rollout_engine.model.cpu.flat_batch import SequenceChunk
from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.composites import TextPart, build_whole, remove_text, text_config_of
from rollout_engine.model.modules.construct import allocate, construct, initialize
from rollout_engine.model.modules.geometry import LayerGeometry, Refusal, keeps_states, probe_geometry
from rollout_engine.model.modules.latent_attention import cache_latents
from rollout_engine.model.modules.mixers import swap_mixers
from rollout_engine.model.modules.one_thread import one_thread
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.model.pictures.encoder import PictureEncoder
from rollout_engine.model.pictures.step_inputs import ChunkPictures, SequencePictures, inputs_of
from rollout_engine.model.pictures.tower import image_token_id_of
from rollout_engine.model.pictures.tower_forward import encode_picture, make_tower_exact, picture_parts

logger = logging.getLogger(__name__)

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "dot", "mv", "convolution"}
"""Operations of aten whose bits may depend on threads and addresses; also all whose names have "attention"."""
_IMAGE_TOKEN = 100
_FIRST_ID = 101
"""The first id of the other special tokens of a small copy."""
_LAYERS = 2
_SIDE = 8
"""Patches of a side of a small copy's picture, if its size is fixed."""
_GRIDS = ((1, 2), (2, 1), (2, 2))
"""Grids of tiles that a small copy may cut a picture into, if its configuration names some."""


class PictureTrial(NamedTuple):
    """The result of the trial of a composite's pictures."""

    refusal: str
    """Why they cannot be computed exactly, as a sentence; "": they can."""
    attention: PictureAttention = "causal"
    """Which layers let a token of a picture see the whole picture."""


def tower_refusal(config: PretrainedConfig) -> str:
    """Why pictures of the composite of `config` cannot be computed exactly, as a sentence; "": they can."""
    return try_pictures(config).refusal


def try_pictures(config: PretrainedConfig) -> PictureTrial:
    """Try whether, and how, pictures of the composite of `config` can be computed exactly.

    That they can is cached on disk, as the gate's results are.
    """
    key = gate_cache.key_of_pictures(config)
    if (known := gate_cache.read_pictures(key)) is not None:
        return PictureTrial("", known)
    name = (config.architectures or [type(config).__name__])[0]
    started = time.perf_counter()
    try:
        with one_thread(), without_advice():
            attention = _check_pictures(config)
    except Refusal as reason:
        return PictureTrial(f"Pictures of {name} cannot be computed exactly: {reason}.")
    gate_cache.write_pictures(key, attention)
    logger.info("Pictures of %s passed their trial in %.2f s.", name, time.perf_counter() - started)
    return PictureTrial("", attention)


def _check_pictures(config: PretrainedConfig) -> PictureAttention:
    """Raise `Refusal` unless a small copy computes pictures as the composite of `config` does; returns how."""
    if image_token_id_of(config) is None:
        raise Refusal("its configuration names no placeholder token of pictures (image_token_id)")
    if getattr(config, "vision_config", None) is None:
        raise Refusal("it has no vision tower")
    problem: Exception | None = None
    for is_small in (True, False):
        try:
            twins = _make_twins(config, is_small=is_small)
            pictures = [_sample_picture(twins.whole, seed) for seed in (0, 1)]
            expected = [_features(twins.whole, picture) for picture in pictures]
            break
        except Exception as failure:  # foreign models may not allow any size
            problem = failure
    else:
        raise Refusal(f"no small copy of it encodes a picture ({type(problem).__name__}: {problem})")
    try:
        products = _compare_features(twins.tower, pictures, expected)
        attention = _find_attention(twins, pictures, [len(rows) for rows, *_ in expected])
    except Refusal:
        raise
    except Exception as failure:  # ours or the model's
        text = str(failure).strip().partition("\n")[0]
        raise Refusal(f"its forward fails with pictures ({type(failure).__name__}: {text})") from None
    if products:
        raise Refusal(f"its tower has products of its own ({', '.join(sorted(products))})")
    return attention


class _Twins(NamedTuple):
    """A small composite as it is, and as an engine holds it."""

    whole: PreTrainedModel
    text: PreTrainedModel
    tower: PreTrainedModel
    geometry: list[LayerGeometry]


def _make_twins(config: PretrainedConfig, *, is_small: bool) -> _Twins:
    text_config = without_unused_scales(config, text_config_of(config))
    text_config = thin_config(shorten_config(text_config, _kept_layers(text_config)))
    text = construct(text_config, dtype=torch.float32, attention=ATTENTION_NAME)
    spread_weights(text)
    cache_latents(text)
    swap_mixers(text)
    small = copy.deepcopy(config)
    _rename_tokens(small, text_config.vocab_size)
    if is_small:
        _shorten_tower(small)
    whole, tower = (build_whole(small, copy.deepcopy(text_config), torch.float32) for _ in range(2))
    remove_text(tower)
    allocate(tower.float(), torch.float32)
    initialize(tower)
    generator = torch.Generator().manual_seed(2)
    for each in picture_parts(tower):
        _spread(each, generator)
    allocate(whole.float(), torch.float32)
    part, head = TextPart.of(whole), text.get_output_embeddings()
    part.decoder.load_state_dict(text.base_model.state_dict(), assign=True)
    part.head.load_state_dict(head.state_dict(), assign=True)
    whole.load_state_dict(tower.state_dict(), strict=False, assign=True)
    make_tower_exact(tower, make_row_invariant)
    small_geometry = probe_geometry(text)
    fuse_projections(text)
    return _Twins(whole, text, tower, small_geometry)


def _kept_layers(config: PretrainedConfig) -> list[int]:
    """The first layers of a text model, with one of each kind that its configuration names, and two at least."""
    kinds = getattr(config, "layer_types", None) or []
    firsts = [kinds.index(kind) for kind in set(kinds)]
    return list(range(min(config.num_hidden_layers, max([_LAYERS - 1, *firsts]) + 1)))


def _rename_tokens(config: Any, vocab_size: int) -> None:
    """Move the ids of special tokens of a composite into a small vocabulary, and its placeholder behind other ids."""
    for number, (name, value) in enumerate(sorted(vars(config).items())):
        if name in ("image_token_id", "image_token_index"):
            setattr(config, name, _IMAGE_TOKEN)
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and value >= vocab_size:
            setattr(config, name, min(_FIRST_ID + number, vocab_size - 1))


def _shorten_tower(config: Any) -> None:
    """Leave a tower its first layers, and pictures of fixed size a few patches; leave out a tower of sounds."""
    vision = config.vision_config
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    depth = next(name for name in ("depth", "num_hidden_layers") if isinstance(getattr(vision, name, None), int))
    num_layers = min(getattr(vision, depth), _LAYERS)
    setattr(vision, depth, num_layers)
    if getattr(vision, "deepstack_visual_indexes", None):
        vision.deepstack_visual_indexes = [*range(num_layers)]
    if getattr(vision, "fullatt_block_indexes", None):
        vision.fullatt_block_indexes = [num_layers - 1]
    layer = getattr(config, "vision_feature_layer", None)
    if isinstance(layer, int) and layer > num_layers:
        config.vision_feature_layer = -1
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int):
        vision.image_size = min(size, patch * _SIDE)
        if getattr(config, "image_grid_pinpoints", None):
            config.image_grid_pinpoints = [[vision.image_size * each for each in grid] for grid in _GRIDS]
    elif isinstance(size, list | tuple) and isinstance(patch, list | tuple):
        vision.image_size = [min(one, each * _SIDE) for one, each in zip(size, patch, strict=True)]


@torch.no_grad()
def _spread(part: nn.Module, generator: torch.Generator) -> None:
    """Draw matrices so that activations keep their size; move vectors by 0.1 from their start."""
    for parameter in part.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, (parameter.numel() / len(parameter)) ** -0.5, generator=generator)
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def _sample_picture(whole: Any, seed: int) -> dict[str, Tensor]:
    """Random arrays of one picture, by the arguments that the model takes."""
    vision, names = whole.config.vision_config, inspect.signature(whole.get_image_features).parameters
    generator = torch.Generator().manual_seed(seed)
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    if "image_grid_thw" in names:
        merge = getattr(vision, "spatial_merge_size", None) or vision.merge_kernel_size[0]
        height, width = (2 + seed) * merge, 3 * merge
        depth = getattr(vision, "temporal_patch_size", None)  # Kimi's patches are pictures, Qwen's are rows of numbers
        shape = (channels, patch, patch) if depth is None else (channels * depth * patch**2,)
        pixels = torch.randn(height * width, *shape, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    if "image_sizes" in names and getattr(whole.config, "image_grid_pinpoints", None):
        return _sample_tiles(vision.image_size, whole.config.image_grid_pinpoints, channels, seed, generator)
    if "image_sizes" in names or vision.model_type == "pixtral":
        side = patch * getattr(whole.config, "spatial_merge_size", 1)
        pixels = torch.randn(1, channels, 2 * side, 3 * side, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([pixels.shape[2:]])}
    if "image_position_ids" in names:
        return _sample_patches(vision.pooling_kernel_size, channels * patch**2, 2 + seed, generator)
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    if "pixel_attention_mask" in names:
        pixels = torch.randn(1, 2, channels, size, size, generator=generator)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 2, size, size, dtype=torch.int64)}
    return {"pixel_values": torch.randn(1, channels, size, size, generator=generator)}


def _sample_tiles(
    size: int, grids: list[list[int]], channels: int, seed: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Random tiles of a picture that is less high than the grid it is cut into, and the whole as a further tile."""
    height, width = sorted(grids, key=math.prod)[seed]
    num_tiles = 1 + (height // size) * (width // size)
    pixels = torch.randn(1, num_tiles, channels, size, size, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height - height // 4, width]])}


def _sample_patches(pool: int, size: int, height: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random patches of a picture of `height` x 3 features, each of `pool` x `pool` patches, with padding behind."""
    num_rows, num_columns = height * pool, 3 * pool
    places = torch.cartesian_prod(torch.arange(num_rows), torch.arange(num_columns)).flip(1)  # (x, y), row after row
    padding = torch.full(((4 - height) * 3 * pool**2, 2), -1)
    positions = torch.cat([places, padding])[None]
    pixels = torch.rand(1, positions.shape[1], size, generator=generator)
    return {"pixel_values": pixels * (positions[..., :1] >= 0), "image_position_ids": positions}


@torch.no_grad()
def _features(whole: Any, picture: Mapping[str, Tensor]) -> list[Tensor]:
    """Features of a picture by the composite's own forward: rows, then those for deeper layers."""
    found = whole.get_image_features(**picture, return_dict=True)
    layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return [torch.cat([*layer]) if not isinstance(layer, Tensor) else layer.flatten(0, -2) for layer in layers]


@torch.no_grad()
def _compare_features(tower: nn.Module, pictures: list[dict[str, Tensor]], expected: list[list[Tensor]]) -> set[str]:
    """Raise `Refusal` for other features than `expected`. Returns the products that torch computes for them."""
    watch = _Products()
    for picture, wanted in zip(pictures, expected, strict=True):
        with watch:
            found = encode_picture(tower, picture)
        ours = [found.rows, *found.deepstack]
        if [each.shape for each in ours] != [each.shape for each in wanted]:
            raise Refusal("its features have other shapes than transformers' own")
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, wanted, strict=True))
        if not error <= TOLERANCE:
            raise Refusal(f"on a small copy its features differ from transformers' own by {error:.1e} of the largest")
    return watch.found


class _Products(TorchDispatchMode):
    """Records products that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or "attention" in name:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _find_attention(twins: _Twins, pictures: list[dict[str, Tensor]], counts: list[int]) -> PictureAttention:
    """Compare logits of a prompt with both pictures, which is computed in uneven chunks, and of tokens behind it.

    Returns the first kind of attention among the tokens of a picture that has the logits of transformers.
    """
    image_token_id = image_token_id_of(twins.whole.config)
    assert image_token_id is not None, "it takes pictures"
    ids, placed = [5, 6, 7], []
    for number, (picture, count) in enumerate(zip(pictures, counts, strict=True)):
        held = Picture.of({name: value.numpy() for name, value in picture.items()})
        placed.append(PlacedPicture(len(ids), len(ids) + count, held))
        ids += [image_token_id] * count + [8 + number, 9, 10]
    wanted = _own_logits(twins.whole, ids, pictures, image_token_id)
    encoder = PictureEncoder(twins.tower, torch.float32, 1 << 30)
    sequence = SequencePictures.of(encoder, ids, placed, image_token_id)
    errors = []
    kinds: tuple[PictureAttention, ...] = ("causal",) if keeps_states(twins.geometry) else ("causal", "all", "windows")
    for kind in kinds:
        found = _paged_logits(twins, ids, sequence, encoder, kind)
        errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
        if errors[-1] <= TOLERANCE:
            return kind
    raise Refusal(
        f"on a small copy its logits differ from transformers' own by {min(errors):.1e} of the largest if there are "
        "pictures, whether their tokens see one another in both directions or not"
    )


def _paged_logits(
    twins: _Twins, ids: list[int], sequence: SequencePictures, encoder: PictureEncoder, attention: PictureAttention
) -> Tensor:
    """Logits [T, V] of the engine's model, over paged KV; chunks split pictures if `attention` lets them."""
    tables = shuffled_tables((len(ids),))
    paged = paged_model(twins.text, twins.geometry, tables)
    found, done = [], 0
    whole = () if attention == "causal" else sequence.placed
    while done < len(ids):
        end = min(done + (7 if len(ids) - done > 9 else 1), len(ids))
        size = end_between_pictures(whole, done, end) - done
        given = inputs_of([ChunkPictures(sequence, done, size)], encoder, attention)
        chunk = SequenceChunk(ids[done : done + size], done, tables[0], 0)
        found.append(paged.forward([chunk], range(size), given))
        done += size
    return torch.cat(found)


def _own_logits(whole: Any, ids: list[int], pictures: list[dict[str, Tensor]], image_token_id: int) -> Tensor:
    """Logits [T, V] by the composite's own forward."""
    tokens = torch.tensor([ids])
    names = inspect.signature(whole.forward).parameters
    kinds = (tokens == image_token_id).int()
    given: dict[str, Tensor] = {
        name: torch.cat([each[name] for each in pictures], 1 if "pixel_attention_mask" in pictures[0] else 0)
        for name in pictures[0]
    }
    given |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    logits: Tensor = whole(input_ids=tokens, use_cache=False, **given).logits[0]
    return logits
