"""Pictures whose tokens see one another: no step splits one, for any budget, prefix hit or preemption."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.pictures import (
    PictureInfo,
    PlacedPicture,
    end_between_pictures,
    start_between_pictures,
)
from rollout_engine.core import config
from tests.unit.core.conftest import IMAGE
from tests.unit.core.random_operations import SHAPES
from tests.unit.core.test_pictures import A, B, around, num_cached, prompt_of, run

WHOLE = dict(pictures=PictureInfo(IMAGE, attention="all"))


def split_pictures(works):
    """Numbers of chunks that begin, and that end, inside of a picture."""
    placed, num_begin, num_end = {}, 0, 0
    for work in works:
        placed |= {new.sequence_id: new.pictures for new in work.new}
        for row in work.scheduled:
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            spans = [(each.start, each.end) for each in placed[row.sequence_id]]
            num_begin += any(a < start < b for a, b in spans)
            num_end += any(a < end < b for a, b in spans)
    return num_begin, num_end


def test_chunks_end_before_a_picture_or_behind_it():
    placed = [PlacedPicture(3, 8, A), PlacedPicture(9, 12, B)]
    assert [end_between_pictures(placed, 0, end) for end in range(1, 14)] == [1, 2, 3, 3, 3, 3, 3, 8, 9, 9, 9, 12, 13]
    assert [end_between_pictures(placed, 3, end) for end in range(3, 10)] == [3, 8, 8, 8, 8, 8, 9]
    assert [start_between_pictures(placed, at) for at in range(13)] == [0, 1, 2, 3, 3, 3, 3, 3, 8, 9, 9, 9, 12]
    assert end_between_pictures((), 0, 5) == start_between_pictures((), 5) == 5


def chunks_of(rig, name):
    ids = set(rig.ids(name))
    rows = [row for work in rig.works for row in work.scheduled if row.sequence_id in ids]
    return [(row.num_computed_tokens, row.num_scheduled_tokens) for row in rows]


def test_a_picture_larger_than_the_budget_takes_a_step_of_its_own(make_rig):
    rig = make_rig(max_num_batched_tokens=4, max_num_seqs=4, **WHOLE)
    token_ids, placed = around(A)  # 9 tokens, 6 of a picture, 5 more
    rig.add("decodes", [1, 2], max_tokens=20)
    rig.add("a", token_ids, pictures=placed, max_tokens=2)
    rig.run()
    assert chunks_of(rig, "a")[-5:] == [(8, 1), (9, 6), (15, 3), (18, 2), (20, 1)]
    rig.assert_clean()


def test_a_hit_inside_a_picture_goes_back_to_its_start(make_rig):
    rig = make_rig(block_size=4, **WHOLE)
    long = [*around(A)[0], *range(9)], around(A)[1]
    assert num_cached(rig, "a", around(A)) == 0
    assert num_cached(rig, "b", around(B)) == 8
    assert num_cached(rig, "a again", long) == 20
    ending = around(A)[0][:15], around(A)[1]  # its last token has to be computed, so all of its picture has
    assert num_cached(rig, "ends with the picture", ending) == 9
    assert num_cached(rig, "first", prompt_of((A, [IMAGE] * 6))) == 0
    assert num_cached(rig, "first again", prompt_of((A, [IMAGE] * 6))) == 0
    assert num_cached(rig, "long again", long) == 28, "blocks that hits gave up are found again"
    assert split_pictures(rig.works) == (0, 0)
    rig.assert_clean()


def test_samples_of_a_prompt_that_ends_with_a_picture_share_it(make_rig):
    rig = make_rig(block_size=4, max_num_batched_tokens=5, max_num_seqs=4, **WHOLE)
    token_ids, placed = around(A)
    rig.add("a", token_ids[:15], pictures=placed, n=3, max_tokens=3)
    rig.run()
    assert [row for row in chunks_of(rig, "a") if row[1] == 6] == [(9, 6)]
    rig.assert_clean()


def test_pictures_without_a_token_between_them_are_refused(make_rig):
    touching = prompt_of(1, (A, [IMAGE] * 3), (B, [IMAGE] * 3), 5)
    with pytest.raises(
        RequestError, match=r"pictures\[1\]=\(4, 7\).*behind 4: this model takes pictures without a token"
    ):
        make_rig(**WHOLE).add("a", touching[0], pictures=touching[1])
    assert num_cached(make_rig(), "a", touching) == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", ["tiny pool", "wide blocks, few slots"])
def test_no_step_splits_a_picture(make_rig, monkeypatch, some_of, shape):
    monkeypatch.setattr(config, "_MAX_PROMPT_LOGITS", 5 * 23)
    rig = make_rig(**dict(vocab_size=23, policy_version=100) | SHAPES[shape] | WHOLE)
    run(rig, f"whole {shape}", some_of(1000))
    assert split_pictures(rig.works) == (0, 0)
    assert rig.core.stats.num_cached_tokens


@pytest.mark.quick(1)
def test_the_negative_control_splits_pictures(make_rig, some_of):
    rig = make_rig(**dict(vocab_size=23, policy_version=100) | SHAPES["tiny pool"])
    run(rig, "split", some_of(1000))
    assert max(split_pictures(rig.works)) > 0
