"""Pictures as values, and as a terminal shows them."""

import numpy as np

from rollout_engine.base.pictures import EncodedPicture, Picture, PlacedPicture

PICTURE = Picture.of({"pixel_values": np.zeros((4096, 1176), np.float32), "image_grid_thw": np.ones((1, 3), np.int64)})


def test_a_picture_is_shown_by_its_digest_and_sizes():
    name = PICTURE.digest.hex()
    expected = f"Picture({name}: image_grid_thw int64[1, 3], pixel_values float32[4096, 1176])"
    assert repr(PICTURE) == expected
    assert len(str(PICTURE.__rich_repr__())) < 150 and name in str(PICTURE.__rich_repr__())
    assert repr(PlacedPicture(3, 9, PICTURE)) == f"PlacedPicture(start=3, end=9, picture={expected})"
    assert repr(Picture(PICTURE.digest, {})) == f"Picture({name}: its digest alone)"
    features = EncodedPicture(PICTURE.digest, "0" * 32, "bfloat16", np.zeros((1024, 64), np.int16), [])
    assert repr(features) == f"EncodedPicture({name}: bfloat16[1024, 64])"
    assert dict(features.__rich_repr__()) == {"digest": name, "rows": "bfloat16[1024, 64]"}
