"""Byte coverage of strided views against a slow truth that marks single elements."""

import random

import pytest
import torch

from rollout_engine.weights.coverage import Coverage, byte_runs, merge_runs


def slow_bytes(view):
    """Every byte offset a view touches in its storage."""
    if view.numel() == 0:
        return set()
    index = torch.as_strided(
        torch.arange(view.untyped_storage().nbytes() // view.element_size()),
        view.shape,
        view.stride(),
        view.storage_offset(),
    )
    return {int(i) * view.element_size() + b for i in index.flatten() for b in range(view.element_size())}


def random_view(base, rng):
    view = base
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.3:
            view = view.transpose(*rng.sample(range(3), 2))
            continue
        dim = rng.randrange(3)
        start = rng.randrange(view.shape[dim])
        view = view.narrow(dim, start, rng.randint(0, view.shape[dim] - start))
        if view.numel() == 0:
            break
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_are_exactly_the_bytes_of_the_view(dtype):
    rng = random.Random(0)
    base = torch.zeros(4, 5, 6, dtype=dtype)
    for _ in range(300):
        view = random_view(base, rng)
        runs = byte_runs(view)
        covered = [b for start, end in runs.tolist() for b in range(start, end)]
        assert len(covered) == len(set(covered))
        assert set(covered) == slow_bytes(view)


def test_a_contiguous_slice_is_one_run():
    assert byte_runs(torch.zeros(8, 16)[2:5]).tolist() == [[2 * 64, 5 * 64]]


@pytest.fixture
def fused():
    """A fused [6, 4] matrix under its own name and under the names of its parts, beside an unrelated vector."""
    whole = torch.zeros(6, 4)
    return Coverage(
        {"whole": whole, "norm": torch.zeros(3), "top": whole[:2], "rest": whole[2:], "columns": whole[:, :2]}
    )


def test_canonical_names_cover_everything_once(fused):
    assert fused.canonical == ["whole", "norm"]


@pytest.mark.parametrize("chosen", [{"whole", "norm"}, {"top", "rest", "norm"}])
def test_either_naming_is_complete(fused, chosen):
    assert fused.missing(chosen) == []
    assert fused.overlapping(chosen) == []


def test_missing_names_the_rest_of_the_naming_in_use(fused):
    assert fused.missing({"top"}) == ["rest", "norm"]
    assert fused.missing(set()) == ["whole", "norm"]


def test_overlaps_are_found_even_when_sizes_add_up(fused):
    assert fused.overlapping({"whole", "top"}) == ["top"]
    assert fused.overlapping({"columns", "top"}) == ["columns"]
    assert fused.overlapping({"top", "rest"}) == []


def test_merged_runs_are_the_same_bytes_in_order_with_gaps_between():
    rng = random.Random(1)
    base = torch.zeros(4, 5, 6)
    for count in [0, 1] + [3] * 200:
        views = [random_view(base, rng) for _ in range(count)]
        runs = merge_runs(*map(byte_runs, views)).tolist()
        assert {i for start, end in runs for i in range(start, end)} == set().union(*map(slow_bytes, views))
        assert all(end < start for (_, end), (start, _) in zip(runs, runs[1:], strict=False))
        assert all(start < end for start, end in runs)
