"""Pictures reach the core over every client, each once; a model without a tower refuses them in the same words."""

import msgspec
import numpy as np
import pytest

from rollout_engine import RequestError
from rollout_engine.base.pictures import Picture, PlacedPicture
from tests.conformance.running import SHORT, last_of, told

PICTURE = Picture.of(
    {"pixel_values": np.arange(500_000, dtype=np.float32).reshape(500, -1), "grid": np.array([[1, 2]])}
)
"""Its arrays take several messages."""


@pytest.fixture
def with_picture(engine, monkeypatch):
    """Send a request whose second token stands for a picture, past the front end's checks."""

    def run():
        client = engine.frontend.client
        add = client.add_request

        def add_with_picture(request, route):
            add(msgspec.structs.replace(request, pictures=[PlacedPicture(1, 2, PICTURE)]), route)

        with monkeypatch.context() as patch:
            patch.setattr(client, "add_request", add_with_picture)
            return last_of(engine, [5, 6, 7], SHORT)

    return run


def test_a_model_without_a_tower_refuses_pictures_which_cross_once(engine, with_picture, same):
    engine.reset_mm_cache()
    before, said = engine.stats.pictures, set()
    for _ in range(3):
        with pytest.raises(RequestError, match="pictures='1 pictures' is not allowed: must be none.") as refusal:
            with_picture()
        said.add(str(refusal.value))
    after = engine.stats.pictures
    found = [getattr(after, name) - getattr(before, name) for name in after.__struct_fields__]
    crosses = not hasattr(engine.frontend.client, "driver")
    assert found == ([1, PICTURE.num_bytes, 2, 0] if crosses else [0] * 4)
    same([*said, told(last_of(engine, [5, 6, 7], SHORT))])
