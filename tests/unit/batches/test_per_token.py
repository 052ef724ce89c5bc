"""A value per sequence is repeated for its tokens, in both layouts."""

import pytest
import torch

from rollout_engine import RequestError, advantages
from rollout_engine.batches.layout import places


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_value_per_sequence_stands_at_all_its_tokens(make_batch, layout, shape):
    batch = make_batch(layout=layout)
    values = torch.randn(len(batch["seed"]))
    spread = advantages.per_token(batch, values.reshape(shape))
    assert spread.shape == batch["tokens", "full"].shape
    for value, place in zip(values, places(batch).full, strict=True):
        assert (spread[place] == value).all()


def test_another_number_of_values_is_refused(make_batch):
    with pytest.raises(RequestError, match=r"advantages.shape=\[1\] is not allowed"):
        advantages.per_token(make_batch(), torch.zeros(1))
