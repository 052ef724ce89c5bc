"""Batches of a collector: each sample comes exactly once, with the seeds of a rollout and the versions that made it."""

import itertools
import threading

import msgspec
import pytest
import torch

from rollout_engine.base.errors import EngineGenerateError, LifecycleError, RequestError, RetryableError, RewardError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.batches.layout import places
from rollout_engine.rollouts.groups import GroupListeners

ROWS = [{"prompt": f"prompt {i}", "answer": i} for i in range(14)]
PARAMS = SamplingParams(max_tokens=24, stop_token_ids=list(range(3, 40)))
"""Answers of many lengths."""


def lengths(prompts, completions, completion_ids, answer):
    return [len(ids) + 100 * number for ids, number in zip(completion_ids, answer, strict=True)]


def collect(rig, rows=ROWS, params=PARAMS, **options):
    return rig.policy.collect(rows, params, **({"num_samples": 3, "groups_per_batch": 4, "seed": 7} | options))


def tokens_of(batch, row):
    return batch["tokens", "full"][row][batch["masks", "all_attention_mask"][row]].tolist()


def samples(*batches):
    """(group_id, sample_index) -> (tokens, seed) of every row; each comes once."""
    found = {}
    for batch in batches:
        for row in range(len(batch["group_id"])):
            key = batch["group_id"][row].item(), batch["sample_index"][row].item()
            assert key not in found, f"{key} came twice"
            found[key] = tokens_of(batch, row), batch["seed"][row].item()
    return found


def rolled_out(make_rig, rows=ROWS, **options):
    rig = make_rig()
    return rig.rollout([row["prompt"] for row in rows], PARAMS, **({"num_samples": 3, "seed": 7} | options))


@pytest.mark.quick(2)
@pytest.mark.parametrize("max_staleness", [0, 1, 3, None])
def test_without_an_update_groups_are_those_of_a_rollout(rig, make_rig, max_staleness):
    batches = list(collect(rig, max_staleness=max_staleness, reward_fn=lengths))
    assert [len(batch) for batch in batches] == [12, 12, 12, 6]
    whole = rolled_out(make_rig, columns={"answer": [row["answer"] for row in ROWS]}, reward_fn=lengths)
    assert samples(*batches) == samples(whole)
    rewards = {(b["group_id"][i].item(), b["next", "reward"][i].item()) for b in batches for i in range(len(b))}
    assert rewards == {(whole["group_id"][i].item(), whole["next", "reward"][i].item()) for i in range(len(whole))}
    assert [batch["answer"] for batch in batches[0]] == batches[0]["group_id"].tolist()


def test_no_answer_is_missing_for_its_length_but_with_oversampling_long_ones_are(rig, make_rig):
    collected = [len(tokens) for tokens, _ in samples(*collect(rig)).values()]
    assert sorted(collected) == sorted(len(tokens) for tokens, _ in samples(rolled_out(make_rig)).values())
    whole, first = (
        rolled_out(make_rig, **options)
        for options in ({"num_samples": 9}, {"oversample": 9})  # the same seeds
    )
    drawn = samples(whole)
    assert all(drawn[key] == sample for key, sample in samples(first).items())
    assert first["masks", "response"].sum(1).float().mean() < whole["masks", "response"].sum(1).float().mean()


def test_what_is_unfinished_goes_on_over_updates_with_truthful_versions(rig, make_rig):
    made, before = {}, rig.executor.execute

    def execute(work):
        output = before(work)
        for task, token in zip(work.samples, output.token_ids, strict=True):
            made.setdefault(task.sequence_id, []).append((token, work.policy_version))
        return output

    rig.executor.execute = execute
    batches, spans = [], set()
    collector = collect(rig, ROWS * 3, max_staleness=2)
    for version, batch in enumerate(collector, start=1):
        batches.append(batch)
        versions, sampled = batch["policy_version"], batch["masks", "all_assistant_mask"]
        assert versions[sampled].min() >= version - 1 - 2
        for row in range(len(batch)):
            tokens, own = batch["tokens", "full"][row][sampled[row]].tolist(), versions[row][sampled[row]].tolist()
            assert list(zip(tokens, own, strict=True)) in made.values()
            spans.add(len(set(own)))
        for _ in range(4):
            rig.engine.step()  # while the trainer works
        rig.core.commit_version(version)
    assert max(spans) > 1, "no sample was carried over an update"
    assert len(samples(*batches)) == 3 * len(ROWS) * 3
    assert collector.stats.num_regenerated == 0
    assert samples(*batches) == samples(rolled_out(make_rig, ROWS * 3))  # the fake model's tokens know no versions


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_that_became_too_old_are_started_again_with_their_seeds(rig, make_rig, max_staleness):
    collector, batches, version = collect(rig, max_staleness=max_staleness), [], 0
    for batch in collector:
        batches.append(batch)
        sampled = batch["masks", "all_assistant_mask"]
        assert batch["policy_version"][sampled].min() >= version - max_staleness
        version += 2
        rig.core.commit_version(version)
    stats = collector.stats
    assert (stats.num_regenerated > 0) == (max_staleness > 0)  # with 0 nothing is in flight at an update
    assert stats.num_started == len(ROWS) + stats.num_regenerated
    assert rig.policy.get_metrics().requests.regenerated_groups == stats.num_regenerated
    assert samples(*batches) == samples(rolled_out(make_rig))


def test_groups_cut_short_by_an_abort_are_started_again_with_their_seeds(rig):
    batches, seeds, client = [], {}, rig.engine.frontend.client
    add_request = client.add_request

    def add(request, *route):
        seeds.setdefault(tuple(request.prompt_token_ids), []).append(request.seed)
        add_request(request, *route)

    client.add_request = add
    collector = collect(rig, max_staleness=3, seed=None)
    for batch in collector:
        batches.append(batch)
        rig.engine.step()
        rig.policy.pause_generation(mode="abort")
        rig.policy.resume_generation()
    assert collector.stats.num_regenerated > 0
    assert len(samples(*batches)) == 3 * len(ROWS)
    assert max(map(len, seeds.values())) > 1 and {len(set(drawn)) for drawn in seeds.values()} == {1}


def test_leaving_the_loop_loses_nothing_and_closing_aborts_all(rig, make_rig):
    collector = collect(rig, max_staleness=2)
    batches = [next(collector)]
    for batch in collector:
        batches.append(batch)
        break
    assert rig.core.has_unfinished_requests()
    batches += collector
    assert samples(*batches) == samples(rolled_out(make_rig))
    with collect(rig, max_staleness=2) as collector:
        next(collector)
        assert collector.stats.num_running + collector.stats.num_complete == 8
    rig.assert_clean()
    with pytest.raises(LifecycleError, match="closed; policy.collect makes a new one"):
        next(collector)
    collector.close()


def test_a_collector_that_nobody_holds_leaves_nothing_in_flight(rig):
    next(collect(rig, max_staleness=2))
    assert len(rig.engine.frontend.streams) == 0
    rig.assert_clean()


def test_each_group_is_heard_of_as_soon_as_it_is_complete(rig):
    heard, running = [], []

    def on_group(group):
        heard.append(group)
        running.append(collector.stats.num_running)

    collector = collect(rig, max_staleness=2, on_group=on_group, reward_fn=lengths, layout="packed")
    batch = next(collector)
    assert len(heard) >= 4 and min(running[:4]) > 0
    assert {int(group["group_id"][0]) for group in heard} >= set(batch["group_id"].tolist())
    assert all(len(places(group).full) == 3 and ("next", "reward") in group.keys(True) for group in heard)
    list(collector)
    assert sorted(int(group["group_id"][0]) for group in heard) == list(range(len(ROWS)))
    assert rig.policy.get_metrics().requests.rollout_staleness.count == 3 * len(ROWS)


def raises(*_, **__):
    raise KeyError("gold")


@pytest.mark.parametrize(
    "options,error",
    [
        ({"reward_fn": raises}, RewardError),
        ({"reward_fn": lambda *_, answer: [float("nan")] * 3}, RewardError),
        ({"on_group": raises}, KeyError),
    ],
)
def test_an_error_of_a_callback_leaves_nothing_in_flight(rig, options, error):
    collector = collect(rig, **options)
    with pytest.raises(error):
        list(collector)
    rig.assert_clean()
    with pytest.raises(LifecycleError, match="closed"):
        next(collector)


def test_a_failed_sequence_leaves_nothing_in_flight(make_rig):
    rig = make_rig(errors={3: "told to fail"})
    with pytest.raises(EngineGenerateError):
        list(collect(rig))
    rig.assert_clean()


def broken_rows():
    yield from ROWS[:8]
    raise OSError("the file is gone")


@pytest.mark.parametrize(
    "rows,error,what",
    [
        (broken_rows(), OSError, "the file is gone"),
        ([*ROWS[:8], {"prompt": "", "answer": 0}], RequestError, r"prompts\[8\]: .*at least one token"),
        ([*ROWS[:8], {"prompt": "x"}], RequestError, r"dataset\[8\]=\[\].*columns of the first row, \['answer'\]"),
    ],
)
def test_a_row_that_cannot_be_read_is_told_after_the_batches_before_it(rig, rows, error, what):
    collector = collect(rig, rows, max_staleness=1)
    first = next(collector)
    assert len(samples(first)) == 12
    with pytest.raises(error, match=what):
        list(collector)
    rig.assert_clean()


def test_a_paused_engine_is_told_and_the_collector_goes_on_after_it(rig, make_rig):
    collector = collect(rig)
    batches = [next(collector)]
    rig.policy.pause_generation(mode="keep")
    with pytest.raises(LifecycleError, match="collect"):
        next(collector)
    rig.policy.resume_generation()
    assert samples(*batches, *collector) == samples(rolled_out(make_rig))


def test_a_paused_engine_that_turns_requests_away_is_asked_again_later(rig, make_rig):
    collector, config = collect(rig, max_in_flight=1), rig.core.config

    def pause(group):
        rig.core.config = msgspec.structs.replace(config, admission="reject")
        rig.policy.pause_generation(mode="keep")

    collector._listeners = GroupListeners(pause)
    with pytest.raises(RetryableError, match="takes no requests"):
        next(collector)
    collector._listeners = GroupListeners()
    rig.policy.resume_generation()
    assert samples(*collector) == samples(rolled_out(make_rig))


def test_only_one_thread_may_collect(rig):
    collector = collect(rig, on_group=lambda group: next(collector))
    with pytest.raises(LifecycleError, match="already collecting"):
        next(collector)


def test_rewards_may_be_async_and_end_with_the_collector(rig):
    async def reward(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    with collect(rig, reward_fn=reward) as collector:
        batch = next(collector)
        assert any(thread.name == "rewards" for thread in threading.enumerate())
    assert batch["next", "reward"].flatten().tolist() == batch["masks", "response"].sum(1).tolist()


def test_a_dataset_may_never_end_and_is_read_as_groups_start(rig):
    read = []
    rows = (read.append(row) or row for row in itertools.cycle(ROWS))
    with collect(rig, rows, max_staleness=1) as collector:
        for _ in range(6):
            batch = next(collector)
        assert batch["group_id"].max() >= len(ROWS)
        assert len(read) == collector.stats.num_started


def test_oversampled_groups_say_what_they_dropped(rig):
    collector = collect(rig, oversample=5)
    batches = list(collector)
    assert all(set(batch["num_dropped"].tolist()) == {2} for batch in batches)
    assert collector.stats.num_dropped == 2 * len(ROWS) == rig.policy.get_metrics().requests.dropped_samples
    assert {index for _, index in samples(*batches)} > {0, 1, 2}


def test_plain_prompts_and_conversations_are_rows_too(rig):
    for rows in (["a", "b"], [[5, 6], [7]], [[{"role": "user", "content": "hi"}]], [{"prompt_token_ids": [5]}]):
        [batch] = collect(rig, rows)
        assert len(batch) == 3 * len(rows)
        assert torch.equal(batch["tokens", "full"], collect(rig, rows).__next__()["tokens", "full"])


@pytest.mark.parametrize(
    "options,what",
    [
        ({"groups_per_batch": 0}, "groups_per_batch=0 is not allowed"),
        ({"groups_per_batch": None}, "groups_per_batch=None is not allowed"),
        ({"max_staleness": -1}, "max_staleness=-1 is not allowed"),
        ({"max_in_flight": 0}, "max_in_flight=0 is not allowed"),
        ({"oversample": 2}, "oversample=2 is not allowed: must be at least the samples to return, 3"),
        ({"params": [PARAMS]}, "sampling_params.*one for all rows"),
        ({"rows": "a"}, "dataset='a' is not allowed: must be an iterable of prompts"),
        ({"rows": []}, "at least one row"),
        ({"rows": [{"prompt": "a", "seed": 1}]}, r"dataset\[0\]='seed'.*another name"),
        ({"num_sample": 2}, "Did you mean 'num_samples'"),
        ({"layout": "flat"}, "layout"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(rig, options, what):
    with pytest.raises(RequestError, match=what):
        next(collect(rig, **options))
