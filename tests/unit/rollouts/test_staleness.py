"""What a collector may start and has to wait for: no batch holds a token that is too old, and every wait ends."""

import random

import pytest

from rollout_engine.rollouts.staleness import StalenessControl


class Trainer:
    """A collector's brain among groups whose lengths are random, and a trainer that may push at any time."""

    def __init__(self, seed, groups_per_batch, max_staleness, max_in_flight=None, updates=lambda draws: 1):
        self.draws, self.updates = random.Random(seed), updates
        self.size, self.max_staleness, self.max_in_flight = groups_per_batch, max_staleness, max_in_flight
        self.control = StalenessControl(groups_per_batch, max_staleness, max_in_flight)
        self.version = self.num_regenerated = self.num_started = 0
        self.todo, self.oldest, self.steps_left = list(range(self.size * 12 + self.draws.randrange(self.size))), {}, {}
        self.batches, self.is_late, self.late_updates = [], False, 0
        """With `is_late`, an update comes while the trainer waits for the next batch already."""

    def refill(self, *, waiting):
        while self.todo and self.control.num_to_start(waiting=waiting):
            index = self.todo.pop(0)
            self.control.note_start(index)
            self.num_started += 1
            self.oldest[index] = self.version
            self.steps_left[index] = self.draws.choice([0, 1, 2, 3, 40])
        if self.max_in_flight is not None:
            assert len(self.control.running) <= self.max_in_flight

    def compute(self):
        """A step: groups end in any order."""
        for index in list(self.control.running):
            self.steps_left[index] -= 1
            if self.steps_left[index] < 0 and self.draws.random() < 0.7:
                self.control.note_completion(index, self.oldest[index])

    def observe(self):
        too_old = self.control.observe(self.version)
        assert all(self.version - self.oldest[index] > self.max_staleness for index in too_old)
        self.num_regenerated += len(too_old)
        self.todo = too_old + self.todo

    def next_batch(self):
        for _ in range(10_000):
            self.observe()
            self.refill(waiting=True)
            if taken := self.control.take(is_last=not self.todo):
                self.batches.append(taken)
                if self.max_staleness is not None:
                    assert all(self.version - self.oldest[index] <= self.max_staleness for index in taken)
                self.refill(waiting=False)
                return taken
            if not self.todo and not self.control.running and not self.control.complete:
                return None
            self.compute()
            if self.draws.random() < 0.3:
                self.arrive()
        raise AssertionError("it waits for ever")

    def arrive(self):
        self.version += self.late_updates
        self.late_updates = 0

    def run(self):
        while self.next_batch() is not None:
            for _ in range(self.draws.randrange(4)):
                self.compute()
            self.arrive()
            self.late_updates = self.updates(self.draws)
            if not self.is_late:
                self.arrive()
        delivered = sorted(index for batch in self.batches for index in batch)
        assert delivered == list(range(len(delivered))), "each is delivered exactly once"
        assert all(len(batch) == self.size for batch in self.batches[:-1])
        return self


@pytest.mark.quick(2)
@pytest.mark.parametrize("max_in_flight", [None, 1, 5])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_with_one_update_a_batch_nothing_is_ever_too_old(max_staleness, max_in_flight):
    for seed in range(40):
        trainer = Trainer(seed, random.Random(seed).choice([1, 3, 8]), max_staleness, max_in_flight)
        assert trainer.run().num_regenerated == 0


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_an_update_may_come_while_the_trainer_waits_already(max_staleness):
    for seed in range(40):
        trainer = Trainer(seed, random.Random(seed).choice([1, 3, 8]), max_staleness)
        trainer.is_late = True
        assert trainer.run().num_regenerated == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "updates", [lambda draws: 0, lambda draws: draws.randrange(4), lambda draws: 3, lambda draws: draws.choice([1, -1])]
)
@pytest.mark.parametrize("max_staleness", [0, 1, 3, None])
def test_whatever_the_trainer_pushes_a_batch_is_never_too_old(max_staleness, updates):
    for seed in range(40):
        Trainer(seed, random.Random(seed).choice([1, 3, 8]), max_staleness, updates=updates).run()


def test_groups_that_several_updates_have_overtaken_are_started_again():
    trainer = Trainer(0, 4, 1, updates=lambda draws: 3).run()
    assert trainer.num_regenerated > 0
    assert trainer.num_started == trainer.num_regenerated + sum(map(len, trainer.batches))


def test_as_many_groups_are_open_as_can_be_in_time():
    control = StalenessControl(4, 2)
    control.observe(0)
    assert (control.num_to_start(waiting=True), control.num_to_start(waiting=False)) == (12, 12)
    for index in range(12):
        control.note_start(index)
    for index in range(4):
        control.note_completion(index, 0)
    assert control.num_to_start(waiting=True) == 0
    assert control.take(is_last=False) == [0, 1, 2, 3]
    assert control.num_to_start(waiting=False) == 0  # eight are open, for the versions 1 and 2
    control.observe(1)
    assert control.num_to_start(waiting=True) == 4


def test_without_staleness_nothing_starts_while_the_trainer_works():
    control = StalenessControl(2, 0)
    control.observe(7)
    for index in range(2):
        control.note_start(index)
        control.note_completion(index, 7)
    assert control.take(is_last=False) == [0, 1]
    assert (control.num_to_start(waiting=False), control.num_to_start(waiting=True)) == (0, 2)
    assert control.observe(8) == [] and control.num_to_start(waiting=False) == 2


def test_without_a_bound_the_engine_stays_full_and_nothing_piles_up():
    control = StalenessControl(4, None)
    control.observe(0)
    assert control.num_to_start(waiting=True) == 8
    for index in range(8):
        control.note_start(index)
    control.note_completion(3, 0)
    assert control.num_to_start(waiting=False) == 1  # eight run
    for index in (0, 1, 2, 4):
        control.note_completion(index, 0)
    assert control.num_to_start(waiting=False) == 4
    for index in range(8, 12):
        control.note_start(index)
    for index in range(8, 12):
        control.note_completion(index, 0)
    assert control.num_to_start(waiting=False) == 0  # nine are complete and three run
    assert control.observe(100) == []


def test_a_batch_waits_for_a_group_that_no_later_one_could_take():
    control = StalenessControl(1, 1)
    control.observe(0)
    control.note_start(0)
    control.note_start(1)
    control.note_completion(1, 0)
    assert control.take(is_last=False) == [1]  # 0 can still come next
    control.observe(1)
    control.note_start(2)
    control.note_completion(2, 1)
    assert control.take(is_last=False) == []  # 0 must come now
    control.note_completion(0, 0)
    assert control.take(is_last=False) == [0]
    control.observe(2)
    assert control.take(is_last=False) == [2]


def test_a_group_whose_first_token_came_late_is_as_old_as_that_token():
    control = StalenessControl(1, 1)
    control.observe(0)
    control.note_start(0)
    control.observe(1)
    control.note_completion(0, 1)
    assert control.observe(2) == []
    assert control.observe(3) == [0]


def test_the_last_batch_is_smaller_and_waits_for_what_runs():
    control = StalenessControl(4, 1)
    control.observe(0)
    for index in range(3):
        control.note_start(index)
    for index in range(2):
        control.note_completion(index, 0)
    assert control.take(is_last=True) == []
    control.note_completion(2, None)
    assert control.take(is_last=False) == []
    assert control.take(is_last=True) == [0, 1, 2]
    assert control.take(is_last=True) == []
