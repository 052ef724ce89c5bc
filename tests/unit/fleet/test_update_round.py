"""Parts of an update of a fleet that need no replica."""

import pytest
import torch

import sync
from rollout_engine.fleet.run.update_round import overlaid
from sync.errors import ManifestMismatch


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_a_part_replaces_what_is_tied_to_it(tmp_path, name):
    tied, other, new = torch.ones(2, 3), torch.zeros(4), torch.full((2, 3), 2.0)
    sync.publish(tmp_path, {"embedding": tied, "head": tied, "norm": other}, 1)
    found = overlaid(str(tmp_path), {name: new})
    assert [each for each, _ in found] == ["norm", name]
    assert found[0][1].materialize().equal(other) and found[1][1].equal(new)


def test_a_part_has_tensors(tmp_path):
    sync.publish(tmp_path, {"norm": torch.zeros(4)}, 1)
    with pytest.raises(ManifestMismatch, match="no tensor"):
        overlaid(str(tmp_path), {})
