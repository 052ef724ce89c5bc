"""Oversampling keeps the first samples to end and ends the others at once; callbacks hear of complete groups."""

import asyncio

import pytest

from rollout_engine.base.errors import EngineGenerateError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.batches.concat import concat
from rollout_engine.batches.jsonl import to_jsonl

PROMPTS = ["one", "three", "a much longer prompt"]
PARAMS = SamplingParams(max_tokens=30, stop_token_ids=list(range(3, 40)))


def rows_of(batch):
    return [
        (
            *(batch[key][row].item() for key in ("group_id", "sample_index", "seed")),
            batch["tokens", "full"][row][batch["masks", "all_attention_mask"][row]].tolist(),
        )
        for row in range(len(batch["group_id"]))
    ]


def test_the_first_to_end_are_kept_and_are_the_samples_of_their_seeds(rig, make_rig):
    batch = rig.rollout(PROMPTS, PARAMS, num_samples=3, oversample=8, seed=5)
    every = rows_of(make_rig().rollout(PROMPTS, PARAMS, num_samples=8, seed=5))
    kept = rows_of(batch)
    assert [row for row in every if row in kept] == kept, "group-major, by sample index, unchanged"
    for group in range(3):
        lengths = {index: len(tokens) for g, index, _, tokens in every if g == group}
        ours = [index for g, index, _, _ in kept if g == group]
        assert len(ours) == 3
        # All start together, so the shortest end first; ties go to the lowest index.
        assert ours == sorted(sorted(lengths, key=lambda index: (lengths[index], index))[:3])
    assert batch["num_dropped"].tolist() == [5] * 9
    assert [seed % 2**64 for _, _, seed, _ in kept] == [child_seed(mix(5, g), i) for g, i, _, _ in kept]


def test_the_others_end_with_the_step_that_brings_the_last_kept_one(rig):
    batch = rig.rollout(["one"], PARAMS, num_samples=2, oversample=12, seed=1)
    assert rig.executor.num_steps <= batch["masks", "response"].sum(1).max() + 1
    assert rig.policy.get_metrics().requests.dropped_samples == 10


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batches_with_counts_of_dropped_samples_go_on_as_others(rig, tmp_path, layout):
    first, second = (rig.rollout(PROMPTS, PARAMS, num_samples=2, oversample=m, seed=1, layout=layout) for m in (4, 6))
    joined = concat([first, second])
    assert joined["num_dropped"].tolist() == [2] * 6 + [4] * 6
    to_jsonl(joined, tmp_path / "rollouts.jsonl")


def test_without_oversampling_nothing_is_counted(rig):
    assert "num_dropped" not in rig.rollout(PROMPTS, PARAMS, num_samples=2).keys()
    batch = rig.rollout(PROMPTS, PARAMS, num_samples=2, oversample=2)
    assert batch["num_dropped"].tolist() == [0] * 6 and batch["sample_index"].tolist() == [0, 1] * 3


def test_a_sample_that_failed_is_not_among_the_first(make_rig):
    rig = make_rig(errors={1: "told to fail"})
    batch = rig.rollout(["one"], PARAMS, num_samples=3, oversample=4, seed=1)
    assert batch["sample_index"].tolist() == [0, 2, 3] and batch["num_dropped"].tolist() == [1] * 3
    rig.assert_clean()
    rig = make_rig(errors={1: "told to fail", 2: "told to fail"})
    with pytest.raises(EngineGenerateError, match="told to fail"):
        rig.rollout(["one"], PARAMS, num_samples=3, oversample=4, seed=1)
    rig.assert_clean()


def test_samples_that_stop_at_a_string_count_as_ended(rig, make_rig):
    params = SamplingParams(max_tokens=30, stop=list("abcdefghijklmnop"))
    kept = rows_of(rig.rollout(PROMPTS, params, num_samples=2, oversample=6, seed=3))
    every = rows_of(make_rig().rollout(PROMPTS, params, num_samples=6, seed=3))
    assert len(kept) == 6 and all(row in every for row in kept)


def test_streamed_groups_are_oversampled_too(rig):
    async def main():
        return [group async for group in rig.policy.arollout(PROMPTS, PARAMS, num_samples=2, oversample=5, seed=1)]

    groups = asyncio.run(main())
    assert [group["num_dropped"].tolist() for group in groups] == [[3, 3]] * 3
    whole = rows_of(rig.rollout(PROMPTS, PARAMS, num_samples=2, oversample=5, seed=1))
    assert sorted(row for group in groups for row in rows_of(group)) == whole


@pytest.mark.parametrize(
    "oversample,what", [(2, "at least the samples to return, 3"), (0, "an int in"), (2.5, "an int")]
)
def test_fewer_samples_than_are_returned_are_refused(rig, oversample, what):
    with pytest.raises(RequestError, match=what):
        rig.rollout(PROMPTS, PARAMS, num_samples=3, oversample=oversample)


def test_each_group_is_heard_of_as_soon_as_it_is_complete(rig):
    heard, running = [], []

    def on_group(group):
        heard.append(group)
        running.append(rig.core.has_unfinished_requests())

    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (9, 2, 5)]
    options = {"num_samples": 2, "reward_fn": lambda completion_ids: [len(ids) for ids in completion_ids]}
    batch = rig.rollout(PROMPTS, params, on_group=on_group, **options)
    assert [group["group_id"].tolist() for group in heard] == [[1, 1], [2, 2], [0, 0]]
    assert running == [True, True, False]
    assert sorted(row for group in heard for row in rows_of(group)) == rows_of(batch)
    assert [group["next", "reward"].flatten().tolist() for group in heard] == [[2, 2], [5, 5], [9, 9]]
    assert rig.policy.get_metrics().requests.rollout_staleness.count == 6


def test_an_error_of_the_callback_leaves_nothing_in_flight(rig):
    def on_group(group):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.rollout(PROMPTS, [SamplingParams(max_tokens=k, ignore_eos=True) for k in (9, 2, 5)], on_group=on_group)
    rig.assert_clean()
