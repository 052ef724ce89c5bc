"""Samples of a journal count for the weights and the rows that made them, and for no others."""

import itertools

import pytest

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.journal.group_records import Contents, Weights
from rollout_engine.rollouts.journal.groups import GroupJournal
from rollout_engine.rollouts.journal.identity import FrontendWeights
from rollout_engine.rollouts.journal.journal import JournalOptions
from tests.unit.rollouts.test_collect import ROWS, collect, samples


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    """Digests of the fake model's weights: version -> digest, or an error of the next reading."""
    digests = {}

    def read(self):
        found = digests.get(self.version, f"d{self.version}")
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(FrontendWeights, "read_digest", read)
    return digests


@pytest.fixture
def path(tmp_path):
    return JournalOptions(directory=str(tmp_path), progress_tokens=1)


@pytest.fixture
def recalled(monkeypatch):
    """Indexes of the groups whose contents were taken from the journal."""
    found, recall = [], GroupJournal.recall

    def noted(self, task, *pictures):
        contents = recall(self, task, *pictures)
        found.extend([] if contents is None else [task.index])
        return contents

    monkeypatch.setattr(GroupJournal, "recall", noted)
    return found


def test_tokens_whose_weights_could_not_be_digested_do_not_continue_under_others(make_rig, path, weights, recalled):
    weights[0] = LifecycleError("in an update")
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        next(collector)
        assert collector.stats.num_running + collector.stats.num_complete
    weights[0] = "other weights of this version, perhaps"
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        next(collector)
        assert not recalled and collector.stats.num_regenerated


def test_weights_of_a_version_that_is_long_past_are_not_taken_for_those_of_its_tokens():
    journal = GroupJournal(None, lambda before: {}, None)
    journal.position.weights.update({version: "d" for version in range(10, 74)})
    spans = {0: (3, 5), 1: (5, 5), 2: (9, 9)}
    journal._contents = {index: Contents(oldest=oldest, newest=newest) for index, (oldest, newest) in spans.items()}
    journal._apply_weights(Weights(5, "d"))
    assert [journal._contents[index].is_lost for index in range(3)] == [True, True, False]


def test_a_checkpoint_with_other_weights_of_a_version_voids_its_tokens(make_rig, path, weights, recalled):
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        state = collector.state_dict()
        next(collector)
        first = collector.state_dict()
    assert first["weights"] == [(0, "d0")] and state["num_rows"] == 0
    weights[0] = "made again, otherwise"
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        next(collector)
        assert collector.stats.num_running + collector.stats.num_complete
    del weights[0]
    recalled.clear()
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        collector.load_state_dict(first)
        next(collector)
        assert not recalled


def test_samples_behind_a_checkpoint_are_not_given_to_other_rows(make_rig, path):
    with collect(make_rig(), journal=path) as collector:
        state = collector.state_dict()
        next(collector)
    rows = [ROWS[0], {**ROWS[1], "prompt": "another question"}, *ROWS[2:]]
    with collect(make_rig(), rows, journal=path) as collector:
        collector.load_state_dict(state)
        with pytest.raises(RequestError, match=r"dataset\[1\].*the row that its group began with"):
            next(collector)
    with collect(make_rig(), journal=path) as collector:
        collector.load_state_dict(state)
        assert samples(*itertools.islice(collector, 4)) == samples(*collect(make_rig()))


def test_weights_that_were_replaced_under_their_number_void_the_tokens_of_the_first(make_rig, path, weights, recalled):
    """Also those that were sampled before the update, and noted behind it."""
    rig = make_rig()
    with collect(rig, max_staleness=2, journal=path) as collector:
        next(collector)
        rig.core.commit_version(0)
        weights[0], rig.engine.frontend.num_updates = "other weights", 1
        next(collector)
        assert collector.stats.num_running + collector.stats.num_complete
    del weights[0]
    with collect(make_rig(), max_staleness=2, journal=path) as collector:
        next(collector)
    assert not recalled


def test_updates_of_a_policy_are_counted_also_those_that_fail(make_rig):
    rig = make_rig()
    with pytest.raises(Exception, match="."):
        rig.policy.update_weights({"nothing": None})
    assert rig.engine.frontend.num_updates == 1


@pytest.mark.parametrize("version_wait", ["wait", "refuse", "end"])
def test_a_collector_of_one_version_raises_once_that_is_past(make_rig, version_wait):
    """With "end" each group would end at once, however often it is started again."""
    rig = make_rig()
    params = SamplingParams(max_tokens=24, policy_version=0, version_wait=version_wait)
    collector = collect(rig, params=params, max_staleness=3)
    next(collector)
    rig.core.commit_version(1)
    with pytest.raises(RequestError, match=r"prompts\[\d+\]: .*policy_version=0"):
        list(collector)
    rig.assert_clean()
