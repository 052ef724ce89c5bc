"""A collector with a journal continues wherever it ended: each group is in one batch, with the same rows."""

import itertools
import json
from collections import Counter

import msgspec
import pytest

from rollout_engine.base.errors import LifecycleError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.batches.jsonl import samples as values_of
from rollout_engine.batches.rollout_files import read_jsonl
from rollout_engine.rollouts.journal.identity import FrontendWeights
from rollout_engine.rollouts.journal.journal import JournalOptions
from tests.unit.rollouts.killed_writes import EACH_KILL, killed_at
from tests.unit.rollouts.test_collect import ROWS, collect, lengths, samples


@pytest.fixture(autouse=True)
def weights(monkeypatch):
    """Digests of the fake model's weights: version -> digest, which a test may change."""
    digests = {}
    monkeypatch.setattr(FrontendWeights, "read_digest", lambda self: digests.get(self.version, f"d{self.version}"))
    return digests


def rows_of(*batches):
    """(group_id, sample_index) -> every value of the sample; each comes once."""
    found = {}
    for sample in itertools.chain(*map(values_of, batches)):
        key = sample["group_id"], sample["sample_index"]
        assert key not in found, f"{key} came twice"
        found[key] = sample
    return found


def small(path, **options):
    return JournalOptions(directory=str(path), **({"progress_tokens": 3} | options))


class Trainer:
    """A trainer that writes a checkpoint after each batch: its rows, and the collector's state."""

    def __init__(self, make_rig, path, *, updates=False, **options):
        self._make_rig, self._updates = make_rig, updates
        self._options = {"reward_fn": lengths, "journal": path} | options
        self.batches, self.state, self.version = [], None, 0

    def run(self):
        """Start as after a kill: a new engine with the weights of the checkpoint."""
        rig = self._make_rig()
        if self.version:
            rig.core.commit_version(self.version)
        with collect(rig, **self._options) as collector:
            if self.state is None:
                self.state = collector.state_dict()
            else:
                collector.load_state_dict(json.loads(json.dumps(self.state)))
            for batch in collector:
                self.batches.append(batch)
                self.state = collector.state_dict()
                if self._updates:
                    self.version += 1
                    rig.core.commit_version(self.version)
            self.stats = collector.stats
        rig.assert_clean()

    def run_with_a_kill(self, number):
        """Whether the kill took place; then it is run again."""
        with killed_at(number):
            self.run()
            return False
        self.run()
        return True


@pytest.mark.quick(1)
@EACH_KILL
@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 1},
        {"max_staleness": 0, "updates": True},
        {"max_staleness": None, "max_in_flight": 3, "seed": None},
    ],
    ids=["without updates", "with updates", "in flight"],
)
def test_rows_are_those_of_an_undisturbed_run_whichever_write_is_the_last(make_rig, tmp_path, options, distance):
    whole = Trainer(make_rig, small(tmp_path / "whole"), **options)
    with killed_at(0) as writes:
        whole.run()
    expected = rows_of(*whole.batches)
    assert len(expected) == 3 * len(ROWS) and len(writes) > 25
    for number in range(1, len(writes) + 1, distance):
        trainer = Trainer(make_rig, small(tmp_path / str(number)), **options)
        assert trainer.run_with_a_kill(number)
        assert rows_of(*trainer.batches) == expected
        assert trainer.stats.num_delivered == len(ROWS)
        assert trainer.stats.num_started == len(ROWS) + trainer.stats.num_regenerated


@EACH_KILL
def test_groups_in_flight_over_updates_are_delivered_once_and_in_time(make_rig, tmp_path, distance):
    expected = samples(*collect(make_rig(), max_staleness=2))  # the fake model's tokens know no versions
    for number in range(2, 60, distance):
        trainer = Trainer(make_rig, small(tmp_path / str(number)), max_staleness=2, updates=True)
        assert trainer.run_with_a_kill(number)
        assert samples(*trainer.batches) == expected
        for version, batch in enumerate(trainer.batches):
            versions = batch["policy_version"][batch["masks", "all_assistant_mask"]]
            assert version - 2 <= versions.min() and versions.max() <= version


@EACH_KILL
def test_of_oversampled_groups_the_first_to_end_in_one_process_are_kept(make_rig, tmp_path, distance):
    every = samples(*collect(make_rig(), num_samples=5))
    for number in range(3, 40, distance):
        trainer = Trainer(make_rig, small(tmp_path / str(number)), oversample=5)
        assert trainer.run_with_a_kill(number)
        found = samples(*trainer.batches)
        assert Counter(group for group, _ in found) == dict.fromkeys(range(len(ROWS)), 3)
        assert all(every[key] == row for key, row in found.items())
        assert trainer.stats.num_dropped == 2 * len(ROWS)


@EACH_KILL
def test_without_a_checkpoint_no_group_comes_twice_and_the_batch_in_doubt_alone_is_missing(
    make_rig, tmp_path, distance
):
    whole = list(collect(make_rig(), reward_fn=lengths))
    with killed_at(0) as writes:
        list(collect(make_rig(), reward_fn=lengths, journal=small(tmp_path / "whole")))
    expected, num_in_doubt = rows_of(*whole), 0
    for number in range(1, len(writes) + 1, distance):
        batches, options = [], {"reward_fn": lengths, "journal": small(tmp_path / str(number))}
        with killed_at(number):
            for batch in collect(make_rig(), **options):
                batches.append(batch)
        num_seen = len(rows_of(*batches)) // 3
        collector = collect(make_rig(), **options)
        in_doubt = collector.stats.num_delivered - num_seen
        batches.extend(collector)
        found = rows_of(*batches)
        assert all(expected[key] == row for key, row in found.items())
        assert len(found) == 3 * (len(ROWS) - in_doubt) and in_doubt in (0, 2, 4)
        num_in_doubt += in_doubt > 0
    assert num_in_doubt <= 4 and (num_in_doubt or distance > 1)


def test_unfinished_groups_continue_behind_their_tokens_and_complete_ones_are_not_sampled_again(make_rig, tmp_path):
    rig, path = make_rig(), small(tmp_path, progress_tokens=1)
    collector = collect(rig, max_staleness=2, reward_fn=lengths, journal=path)
    first = next(collector)
    num_complete, num_running = collector.stats.num_complete, collector.stats.num_running
    assert num_running
    collector.close()
    rig, added = make_rig(), []
    client = rig.engine.frontend.client
    add_request = client.add_request
    client.add_request = lambda request, *route: (added.append(request), add_request(request, *route))
    found = collect(rig, max_staleness=2, journal=path, reward_fn=lengths)
    batches = [first, *found]
    assert rows_of(*batches) == rows_of(*collect(make_rig(), max_staleness=2, reward_fn=lengths))
    assert any(request.output_token_ids for request in added)
    assert all(len(request.output_token_ids) < 24 for request in added)
    assert num_complete == 0 or len({r.first_sequence_id for r in added}) < 3 * (len(ROWS) - 4)


def test_groups_of_other_weights_are_sampled_anew_and_a_line_says_so(make_rig, tmp_path, weights, caplog):
    path = small(tmp_path, progress_tokens=1)
    collector = collect(make_rig(), max_staleness=2, journal=path)
    batches = [next(collector)]
    collector.close()
    weights[0] = "another"
    collector = collect(make_rig(), max_staleness=2, journal=path)
    batches += collector
    assert samples(*batches) == samples(*collect(make_rig(), max_staleness=2))  # the fake's tokens know no weights
    assert "are sampled anew: the live weights (version 0, digest another) are not those that sampled" in caplog.text
    assert collector.stats.num_regenerated > 0


def test_an_older_version_sees_nothing_of_later_ones_and_the_same_weights_made_again_do(make_rig, tmp_path, weights):
    options = {"max_staleness": 0, "updates": True}
    trainer = Trainer(make_rig, small(tmp_path), **options)
    trainer.run()
    expected, early = rows_of(*trainer.batches), trainer.batches[:1]
    for digests in ({}, {2: "other weights"}):
        weights.update(digests)
        again = Trainer(make_rig, small(tmp_path), **options)
        again.state, again.version, again.batches = _state_after(make_rig, tmp_path, 1), 1, [*early]
        again.run()
        found = rows_of(*again.batches)
        assert found.keys() == expected.keys()
        assert (found == expected) and again.stats.num_delivered == len(ROWS)


def _state_after(make_rig, tmp_path, num_batches):
    trainer = Trainer(make_rig, None, max_staleness=0, updates=True)
    rig = make_rig()
    with collect(rig, max_staleness=0, reward_fn=lengths, journal=trainer._options["journal"]) as collector:
        for _ in range(num_batches):
            next(collector)
        return collector.state_dict()


def test_a_journal_of_small_segments_removes_the_old_ones_and_loses_nothing(make_rig, tmp_path):
    path = small(tmp_path / "small", segment_bytes=1 << 12, keep_segments=1)
    whole = rows_of(*collect(make_rig(), ROWS * 4, reward_fn=lengths))
    batches, rounds = [], 0
    while len(rows_of(*batches)) < len(whole):
        with collect(make_rig(), ROWS * 4, reward_fn=lengths, journal=path) as collector:
            batches += itertools.islice(collector, 2)
        rounds += 1
    assert rows_of(*batches) == whole and rounds > 5
    numbers = sorted(int(file.stem.split("-")[1]) for file in (tmp_path / "small").glob("*.log"))
    assert len(numbers) < 10 < numbers[0] and numbers[-1] - numbers[0] == len(numbers) - 1
    assert list(collect(make_rig(), ROWS * 4, reward_fn=lengths, journal=path)) == []


def test_a_journal_of_another_run_is_refused_with_the_differences(make_rig, tmp_path):
    path = tmp_path / "j"
    next(collect(make_rig(), reward_fn=lengths, journal=path))
    for options, why in (
        ({"seed": 8, "reward_fn": lengths}, "seed was 7 and is 8"),
        ({}, r"reward_fn was \['lengths'\] and is \[\]"),
        ({"num_samples": 2, "reward_fn": lengths}, "num_samples was 3 and is 2"),
        (
            {"params": SamplingParams(max_tokens=5), "reward_fn": lengths},
            r"sampling_params\.max_tokens was 24 and is 5",
        ),
    ):
        with pytest.raises(RequestError, match=f"belongs to another run: .*{why}"):
            collect(make_rig(), journal=path, **options)
    collector = collect(make_rig(), [{"prompt": "other", "answer": 1}, *ROWS[1:]], reward_fn=lengths, journal=path)
    with pytest.raises(RequestError, match="dataset"):
        next(collector)
    with pytest.raises(RequestError, match="journal"):
        collect(make_rig(), journal=3)
    list(collect(make_rig(), reward_fn=lengths, journal=path))


def test_a_second_collector_is_refused_until_the_first_is_closed(make_rig, tmp_path):
    first = collect(make_rig(), journal=tmp_path)
    with pytest.raises(RequestError, match="Another collector writes to it"):
        collect(make_rig(), journal=tmp_path)
    first.close()
    assert samples(*collect(make_rig(), journal=tmp_path)) == samples(*collect(make_rig()))


def test_without_a_seed_the_journal_keeps_the_one_that_was_drawn(make_rig, tmp_path):
    whole = rows_of(*collect(make_rig(), seed=None, journal=tmp_path / "whole"))
    batches = []
    while len(batches) < 4:
        with collect(make_rig(), seed=None, journal=tmp_path / "parts") as collector:
            batches += itertools.islice(collector, 1)
    assert rows_of(*batches) == whole


def test_a_log_has_every_group_once(make_rig, tmp_path):
    log, batches = tmp_path / "log.jsonl", []
    for _ in range(4):
        rig = make_rig()
        rig.policy.collective_rpc = lambda name: ["digest"]
        with collect(rig, journal=tmp_path / "j", log_to=log, max_staleness=2) as collector:
            batches += itertools.islice(collector, 1)
    lines = read_jsonl(log)
    assert sorted((line["group_id"], line["sample_index"]) for line in lines) == sorted(samples(*batches))


def test_a_state_without_a_journal_continues_with_the_seeds_of_its_groups(make_rig):
    whole = samples(*collect(make_rig(), max_staleness=2))
    with collect(make_rig(), max_staleness=2) as collector:
        batches = [next(collector), next(collector)]
        state = json.loads(json.dumps(collector.state_dict()))
        assert len(state["open"]) == collector.stats.num_running + collector.stats.num_complete > 0
        counts = collector.stats
    collector = collect(make_rig(), max_staleness=2)
    collector.load_state_dict(state)
    assert msgspec.structs.replace(counts, num_running=0, num_complete=0) == collector.stats
    batches += collector
    assert samples(*batches) == whole
    assert collector.state_dict()["open"] == [] and collector.state_dict()["num_rows"] == len(ROWS)


def test_a_state_is_loaded_before_the_first_batch_and_by_its_own_run(rig):
    collector = collect(rig)
    state = collector.state_dict()
    other = collect(rig, seed=8)
    with pytest.raises(RequestError, match="state_dict belongs to another run: seed was 7 and is 8"):
        other.load_state_dict(state)
    next(collector)
    with pytest.raises(LifecycleError, match="before the first next"):
        collector.load_state_dict(state)
    collector.close()


def test_a_state_beyond_the_end_of_the_journal_is_refused(make_rig, tmp_path):
    with collect(make_rig()) as collector:
        next(collector), next(collector)
        state = collector.state_dict()
    with collect(make_rig(), journal=tmp_path) as collector:
        next(collector)
    with collect(make_rig(), journal=tmp_path) as collector, pytest.raises(RequestError, match="ends before it"):
        collector.load_state_dict(state)
    with collect(make_rig(), journal=tmp_path / "new") as collector:
        collector.load_state_dict(state)
        assert min(group for group, _ in samples(next(collector))) > 0


def test_a_state_cannot_be_taken_while_a_batch_is_made(rig):
    def on_group(group):
        with pytest.raises(LifecycleError, match="already collecting"):
            collector.state_dict()

    collector = collect(rig, on_group=on_group)
    next(collector)
    collector.close()
