"""Pictures of Kimi K2.5: sizes, values and texts of its processor, which transformers has for torchvision alone."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from rollout_engine.base.pictures import Picture
from rollout_engine.batches.picture_images import png_of
from rollout_engine.testing.tiny_pictures import FAMILIES, random_picture, vision_tokenizer
from rollout_engine.text.kimi_patches import KimiImages, KimiPatches
from rollout_engine.text.picture_processor import read_image_processor

PUBLISHED = dict(
    in_patch_limit=100,
    patch_size=4,
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
    merge_kernel_size=2,
    fixed_output_tokens=None,
    patch_limit_on_one_side=12,
)
SAVED = dict(max_patches=100, patch_size=4, merge_size=2, size=dict(max_height=12, max_width=12), resample=3)


@pytest.mark.parametrize("settings", [SAVED, dict(media_proc_cfg=PUBLISHED)], ids=["saved", "published"])
@pytest.mark.parametrize(
    ("size", "grid"),
    [((40, 32), (8, 10)), ((33, 17), (6, 10)), ((80, 80), (10, 10)), ((7, 3), (2, 2)), ((400, 8), (2, 12))],
    ids=str,
)
def test_images_are_made_smaller_and_padded_to_whole_features(settings, size, grid):
    found = KimiImages(settings)(random_picture(1, *size))
    assert found["image_grid_thw"].tolist() == [[1, *grid]]
    assert found["pixel_values"].shape == (grid[0] * grid[1], 3, 4, 4) and found["pixel_values"].dtype == np.float32


def test_patches_are_those_of_the_image_and_black_behind_it():
    image = random_picture(2, 38, 32)
    found = KimiImages(SAVED)([image], return_tensors="np")
    shown = Image.open(io.BytesIO(png_of(Picture.of(found))))
    whole = np.zeros((32, 40, 3), np.uint8)
    whole[:, :38] = np.asarray(image)
    assert np.array_equal(np.asarray(shown), whole)
    assert found["pixel_values"].min() >= -1 and found["pixel_values"].max() <= 1


def test_its_text_is_a_placeholder_for_each_feature(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="kimi_k25")))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FAMILIES["kimi_k25"].images))
    processor = KimiPatches(read_image_processor(tmp_path), vision_tokenizer("kimi_k25"), {})
    made = processor(images=[random_picture(1, 40, 32)], text=[processor.image_token])
    assert made["text_replacement_offsets"] == [[{"replacement": "<|media_pad|>" * 20}]]


@pytest.mark.parametrize(
    "settings", [dict(resample=2), dict(do_normalize=False), dict(media_proc_cfg=dict(fixed_output_tokens=64))], ids=str
)
def test_settings_that_are_not_read_are_refused(settings):
    with pytest.raises(ValueError, match=r"its setting \w+ is .*, and .* is read"):
        KimiImages(settings)


def test_a_tokenizer_without_the_placeholder_is_refused():
    with pytest.raises(ValueError, match="no token '<.media_pad.>'"):
        KimiPatches(KimiImages({}), vision_tokenizer("llava"), {})
