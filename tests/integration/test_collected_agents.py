"""A collector over agents: groups in flight over updates, each delivered once, with the rows of a rollout."""

import threading

import httpx2
import pytest

from rollout_engine import Agent, RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import ConfigError, EpisodeError, RequestError
from rollout_engine.testing import tiny_checkpoint, tiny_model

OPTIONS = dict(num_kv_blocks=256, max_model_len=512, num_threads=1, log_stats=False)
PARAMS = SamplingParams(max_tokens=6)
TASKS = [{"words": ["Hello", "Again"][: 1 + index % 2], "number": index} for index in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def kept(checkpoint):
    """A policy whose weights no test replaces."""
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made


@pytest.fixture
def policy(checkpoint):
    before = threading.active_count()
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as made:
        yield made
        assert made.get_num_unfinished_requests() == 0
    assert threading.active_count() <= before + 2, "the steps' thread ends soon"


def converse(session, task):
    """Say each word, and be rewarded with the task's number."""
    messages = []
    url, headers = f"{session.openai_base_url}/chat/completions", {"x-api-key": session.api_key}
    for word in task["words"]:
        messages.append({"role": "user", "content": word})
        answer = httpx2.post(url, json={"messages": messages}, headers=headers, timeout=60)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
    return float(task["number"])


def collect(policy, tasks=TASKS, agent=converse, **options):
    given = {"num_samples": 2, "groups_per_batch": 2, "seed": 3, "env": Agent(agent)} | options
    return policy.collect(tasks, PARAMS, **given)


def rows_of(*batches):
    """(group, sample, row) -> ids and log-probs of a row; each comes once."""
    found = {}
    for batch in batches:
        for index in range(len(batch)):
            key = tuple(batch[name][index].item() for name in ("group_id", "sample_index", "row_index"))
            assert key not in found, f"{key} came twice"
            real = batch["masks", "all_attention_mask"][index]
            ids = batch["tokens", "full"][index][real].tolist()
            found[key] = ids, batch["log_probs", "full"][index][real].tolist(), batch["next", "reward"][index].item()
    return found


def test_every_group_is_delivered_once_with_the_rows_of_a_rollout(kept):
    options = {"num_samples": 2, "seed": 3, "use_tqdm": False}
    expected = kept.rollout(TASKS, PARAMS, env=Agent(converse), **options)
    with collect(kept, iter(TASKS), max_staleness=None, max_in_flight=2) as collector:
        batches = list(collector)
    assert rows_of(*batches) == rows_of(expected) and len(batches) == 3
    assert collector.stats.num_delivered == 6 and not collector.stats.num_regenerated
    assert exact.check(batches[0], model=exact.enable(tiny_model())).is_exact


def test_without_staleness_every_token_is_of_the_live_weights(policy):
    versions = []
    with collect(policy, max_staleness=0) as collector:
        for batch in collector:
            versions.append(set(batch["policy_version"][batch["masks", "all_assistant_mask"]].tolist()))
            policy.update_weights(tiny_model(seed=len(versions)))
    assert versions == [{0}, {1}, {2}]


@pytest.mark.slow
def test_a_group_that_is_too_old_is_played_again_from_its_seeds(policy):
    may_end, begun = threading.Event(), []

    def slow(session, task):
        begun.append(task["number"])
        found = converse(session, task)
        if task["number"] == 0 and begun.count(0) <= 2:  # both samples of the first start
            may_end.wait(60)
        return found

    with collect(
        policy, TASKS[:3], slow, groups_per_batch=1, max_staleness=1, on_group=lambda batch: None
    ) as collector:
        first = next(collector)
        assert first["group_id"].tolist() == [1, 1]
        for seed in (1, 2):
            policy.update_weights(tiny_model(seed=seed))
        rest = list(collector)
    may_end.set()
    assert collector.stats.num_regenerated == 1 and begun.count(0) == 4
    assert sorted(batch["group_id"][0].item() for batch in rest) == [0, 2]
    assert all(batch["policy_version"].max() == 2 for batch in rest)


def test_a_state_begins_groups_in_flight_anew_with_their_seeds(kept):
    with collect(kept, max_staleness=None, max_in_flight=2) as whole:
        expected = rows_of(*whole)
    with collect(kept, max_staleness=None, max_in_flight=2) as first:
        seen, state = rows_of(next(first)), first.state_dict()
    with collect(kept, max_staleness=None, max_in_flight=2) as second:
        second.load_state_dict(state)
        assert rows_of(*second) | seen == expected
    with collect(kept, seed=4) as other, pytest.raises(RequestError, match="seed was 3 and is 4"):
        other.load_state_dict(state)


def test_agents_that_all_fail_are_an_error_and_some_are_not(kept):
    def fails(session, task):
        if task["number"] != 5:
            raise OSError("no such tool")
        return converse(session, task)

    with collect(kept, agent=fails) as collector, pytest.raises(EpisodeError, match="last 2 groups.*no such tool"):
        next(collector)
    with collect(kept, TASKS[4:], fails) as collector:
        batch = next(collector)
    assert [each is None for each in batch["error"]].count(True) == 2


@pytest.mark.parametrize(
    "options, said",
    [
        ({"journal": "somewhere"}, "cannot be continued in its middle"),
        ({"reward_fn": len}, "Agent\\(reward="),
        ({"tasks": "task"}, "iterable of rows"),
        ({"tasks": None}, "iterable of rows"),
        ({"num_episodes": 3}, "num_episodes"),
        ({"oversample": 3}, "oversample"),
        ({"tools": [converse]}, "tools"),
        ({"layout": "square"}, "layout"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_starts(kept, options, said):
    with pytest.raises((RequestError, ConfigError), match=said):
        collect(kept, **options)


def test_a_task_that_json_cannot_hold_is_named(kept):
    with collect(kept, [{"words": [], "number": object()}]) as collector:
        with pytest.raises(RequestError, match=r"dataset\[0\]"):
            next(collector)
