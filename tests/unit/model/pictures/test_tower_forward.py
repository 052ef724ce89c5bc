"""A picture's features: the same bits alone and among others, on any number of threads, and those of transformers."""

import copy

import pytest
import torch

from rollout_engine import ConfigError
from rollout_engine.base.pictures import Picture
from rollout_engine.model.cpu.row_invariance import make_row_invariant
from rollout_engine.model.modules.composites import remove_text
from rollout_engine.model.modules.one_thread import one_thread
from rollout_engine.model.pictures.encoder import PictureEncoder
from rollout_engine.model.pictures.tower_forward import encode_picture, make_tower_exact
from rollout_engine.testing import tiny_pictures
from rollout_engine.testing.tiny_pictures import random_picture, tiny_vision_checkpoint, tiny_vision_model
from rollout_engine.text.picture_processor import read_image_processor

QUICK = {"qwen2_5_vl", "qwen3_vl", "mistral3"}
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tiny_pictures.FAMILIES]


def pictures_of(directory, *sizes):
    """Arrays of random pictures, as the checkpoint's image processor makes them."""
    processor = read_image_processor(directory)
    drawn = [random_picture(seed, width, height) for seed, (width, height) in enumerate(sizes)]
    return [Picture.of(dict(processor(each, return_tensors="np"))) for each in drawn]


def tensors(picture):
    return {name: torch.from_numpy(array.copy()) for name, array in picture.arrays.items()}


def bits(features):
    return [each.clone() for each in (features.rows, *features.deepstack)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return request.param, tiny_vision_checkpoint(tmp_path_factory.mktemp("tower"), request.param)


@pytest.mark.quick(1)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_other_pictures_nor_threads_change_a_bit(checkpoint, dtype):
    family, directory = checkpoint
    trainer = tiny_vision_model(family, dtype=dtype)
    tower = copy.deepcopy(trainer)
    make_tower_exact(trainer, make_row_invariant)
    remove_text(tower)
    make_tower_exact(tower, make_row_invariant)
    pictures = pictures_of(directory, (40, 32), (28, 20), (37, 61))
    with one_thread():
        alone = [bits(encode_picture(trainer, tensors(each))) for each in pictures]
    assert not same(alone[0], alone[1]) and all(each[0].isfinite().all() for each in alone)
    encoder = PictureEncoder(tower, dtype, 1 << 30)
    for order in ((0, 1, 2), (2, 0, 1)):
        encoder.reset()
        for index in order:
            assert same(bits(encoder.features(pictures[index])), alone[index])
    assert encoder.num_encoded == 6 and same(bits(encoder.features(pictures[1])), alone[1])
    assert encoder.num_encoded == 6


def test_features_and_gradients_are_transformers_own_up_to_rounding(checkpoint):
    family, directory = checkpoint
    theirs = tiny_vision_model(family)
    theirs.set_attn_implementation("eager")
    ours = copy.deepcopy(theirs)
    make_tower_exact(ours, make_row_invariant)
    (picture,) = pictures_of(directory, (40, 32))
    found = encode_picture(ours, tensors(picture))
    given = {name: value for name, value in tensors(picture).items() if name in ("pixel_values", *TAKEN)}
    wanted = theirs.get_image_features(**given, return_dict=True)
    rows = wanted.pooler_output
    rows = rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat([*rows])
    layers = [torch.cat([*each]) for each in getattr(wanted, "deepstack_features", None) or ()]
    for mine, its in zip([found.rows, *found.deepstack], [rows, *layers], strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-4 * float(its.detach().abs().max()))
    for features, deeper in ((found.rows, found.deepstack), (rows, layers)):
        sum(each.square().sum() for each in (features, *deeper)).backward()
    named = dict(theirs.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in named.values() if each.grad is not None)
    for name, parameter in ours.named_parameters():
        other = named[name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-6 * largest)


TAKEN = ("image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")


def test_dropout_and_arrays_of_another_model_are_refused():
    model = tiny_vision_model("llava")
    make_tower_exact(model, make_row_invariant)
    with pytest.raises(ConfigError, match=r"does not take this picture \(pixel_values \[3, 8\]\)"):
        encode_picture(model, {"pixel_values": torch.ones(3, 8)})
    model.config.vision_config.attention_dropout = 0.5
    for child in model.modules():
        if hasattr(child, "dropout") and isinstance(child.dropout, float):
            child.dropout = 0.5
    model.train()
    with pytest.raises(ConfigError, match="drops attention weights at random"):
        encode_picture(model, {"pixel_values": torch.ones(1, 3, 24, 24)})


def test_features_that_are_kept_are_bounded(tmp_path):
    directory = tiny_vision_checkpoint(tmp_path, "qwen2_5_vl")
    tower = tiny_vision_model("qwen2_5_vl")
    make_tower_exact(tower, make_row_invariant)
    first, second = pictures_of(directory, (40, 32), (28, 20))
    encoder = PictureEncoder(tower, torch.float32, 1)
    for picture in (first, first, second, second, first):
        encoder.features(picture)
    assert encoder.num_encoded == 3 and encoder.num_bytes == encoder.features(first).rows.nbytes
