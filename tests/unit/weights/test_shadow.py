"""The next values of live views are gathered in a shadow and copied over them."""

import pytest
import torch

from rollout_engine.base.errors import WeightUpdateError
from rollout_engine.model.cpu.shadow_memory import CpuShadowMemory
from rollout_engine.weights.shadow import Shadow


class Counted(CpuShadowMemory):
    """Tells the runs of every plan."""

    def __init__(self):
        self.planned = []

    def prepare_copy(self, pairs):
        self.planned.append([len(target) for _, target in pairs])
        return super().prepare_copy(pairs)


@pytest.fixture
def memory():
    return Counted()


@pytest.fixture
def shadow(memory):
    return Shadow(memory)


def interleaved():
    """Two halves of one storage, row by row in turn, and a storage of its own."""
    rows = torch.zeros(3, 2, 4)
    return [rows[:, 0], rows[:, 1], torch.zeros(7, dtype=torch.bfloat16)]


def test_views_that_are_parts_of_one_another_are_copied_as_one_run_and_planned_once(shadow, memory):
    views = interleaved()
    for n in (1, 2):
        for i, view in enumerate(views):
            shadow.of(view).fill_(10 * n + i)
        shadow.plan(views)
        assert [view.unique().tolist() for view in views] != [[10 * n], [10 * n + 1], [10 * n + 2]]
        shadow.commit()
        assert [view.unique().tolist() for view in views] == [[10 * n], [10 * n + 1], [10 * n + 2]]
    assert memory.planned == [[3 * 2 * 4 * 4, 14]]


def test_bytes_that_no_view_covers_keep_their_values(shadow):
    row = torch.arange(9.0)
    views = [row[1:3], row[5:6], row[3:4], torch.zeros(0)]
    for view in views:
        shadow.of(view).fill_(-1)
    shadow.plan(views)
    shadow.commit()
    assert row.tolist() == [0, -1, -1, -1, 4, -1, 6, 7, 8]


def test_memory_that_was_let_go_is_planned_for_anew(shadow, memory):
    view = torch.zeros(5)
    for n in (1, 2):
        assert not shadow.holds(view) and shadow.num_bytes == 0
        shadow.of(view).fill_(n)
        assert shadow.holds(view) and shadow.num_bytes == 20
        shadow.plan([view])
        shadow.commit()
        shadow.clear()
        shadow.plan([])  # an update in place
        shadow.commit()
        assert view.tolist() == [n] * 5
    assert memory.planned == [[20], [], [20], []]


def test_where_there_is_no_room_for_all_none_is_kept(shadow, memory, monkeypatch):
    views, allocate = interleaved(), memory.allocate

    def allocate_large(num_bytes):
        if num_bytes < 20:
            raise WeightUpdateError("no room")
        return allocate(num_bytes)

    monkeypatch.setattr(memory, "allocate", allocate_large)
    shadow.of(views[0])
    with pytest.raises(WeightUpdateError, match="no room"):
        shadow.of(views[2])
    assert shadow.num_bytes == 0 and not any(map(shadow.holds, views))


def test_all_is_reserved_as_one_piece_whose_parts_are_aligned_and_apart(shadow, memory, monkeypatch):
    views, allocated, allocate = interleaved(), [], memory.allocate
    monkeypatch.setattr(memory, "allocate", lambda size: allocated.append(size) or allocate(size))
    shadow.reserve(views)
    shadow.reserve(views)
    assert allocated == [1024] and all(map(shadow.holds, views)) and shadow.num_bytes == 3 * 2 * 4 * 4 + 14
    for i, view in enumerate(views):
        place = shadow.of(view).fill_(i + 1)
        assert (place.shape, place.stride(), place.dtype) == (view.shape, view.stride(), view.dtype)
    shadow.plan(views)
    shadow.commit()
    assert [view.unique().tolist() for view in views] == [[1], [2], [3]] and len(allocated) == 1


def test_a_reservation_without_room_keeps_nothing(shadow, memory, monkeypatch):
    def refuse(num_bytes):
        raise WeightUpdateError("no room")

    views = interleaved()
    shadow.of(views[2])
    monkeypatch.setattr(memory, "allocate", refuse)
    with pytest.raises(WeightUpdateError, match="no room"):
        shadow.reserve(views)
    assert shadow.num_bytes == 0
