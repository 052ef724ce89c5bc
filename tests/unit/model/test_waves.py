"""The protocol of engines that step together, played in random interleavings of its atomic moves.

Each engine has a main thread, with steps of its own and orders that all get, and a thread that pays what it owes. A
round ends when all engines have joined it. Whatever order the moves come in, all steps end, all orders are obeyed, and
rows meet experts of their own weights alone.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_engine.model.ranks.waves import NUM_FIELDS, Field, Stage, Waves

MOST_MOVES = 20_000


class Play:
    """Engines whose moves are chosen one by one."""

    def __init__(self, size, steps=(), orders=()):
        """`steps`: for each engine, (rounds, turns kept) of each step. `orders`: see `obey`."""
        numbers = np.zeros((NUM_FIELDS, size), np.int64)
        lock = threading.RLock()
        self.engines = [Waves(numbers, rank, lambda: lock) for rank in range(size)]
        self.joined = [[] for _ in range(size)]
        """For each engine, the key under which it has joined each round."""
        self.computing = [threading.Lock() for _ in range(size)]
        self.steps = [list(each) for each in steps]
        self.orders, self.num_obeyed = list(orders), [0] * size
        self.threads = {}
        for rank in range(len(steps)):
            self.threads[rank, "main"] = self.main(rank)
            self.threads[rank, "own"] = self.own(rank)

    def ended(self, number):
        """Whether a round has ended: all engines have come to its last meeting."""
        return all(len(keys) >= number for keys in self.joined)

    def join(self, rank, number):
        keys = self.joined[rank]
        assert number == len(keys) + 1, "no round is left out"
        assert self.engines[rank]._get(Field.STAGE) in (Stage.OPEN, Stage.CLOSING), "a closed engine takes no part"
        keys.append(self.engines[rank]._get(Field.KEY))

    def main(self, rank) -> Iterator[bool]:
        """Moves of a main thread: True, it has moved; False, it waits. Orders are taken before each step."""
        engine = self.engines[rank]
        engine.open(0)
        yield True
        while self.steps[rank] or self.num_obeyed[rank] < len(self.orders):
            if self.num_obeyed[rank] < min(len(self.orders), min(self.num_obeyed) + 1):
                yield from self.obey(rank, *self.orders[self.num_obeyed[rank]])
                self.num_obeyed[rank] += 1
                continue
            engine.set_work(bool(self.steps[rank]))
            yield True
            if self.steps[rank] and engine.try_hold():
                yield True
                yield from self.step(rank, *self.steps[rank].pop(0))
            else:
                yield False
        engine.set_work(False)
        yield True

    def obey(self, rank, name, argument):
        """An order that all engines get, once all have obeyed the one before.

        ("update", version); ("sleep", whether politely); ("wake", None); or for one engine alone ("nap", rank).
        """
        engine = self.engines[rank]
        if name == "update":
            yield from self.close(rank)
            yield True
            engine.open(argument)
        elif name == "sleep":
            engine.set_work(False)
            yield from self.close(rank, politely=argument)
        elif name == "wake":
            engine.open(engine._get(Field.KEY))
        elif rank == argument:
            yield from self.close(rank)
            yield True
            engine.open(engine._get(Field.KEY))
        yield True

    def step(self, rank, num_rounds, num_kept):
        """Some rounds under a hold, in several turns of the computing thread."""
        engine = self.engines[rank]
        for _ in range(1 + num_kept):
            assert engine.try_hold(), "a hold lasts"
            while not self.computing[rank].acquire(blocking=False):
                yield False
            for _ in range(num_rounds):
                number = engine.begin_round()
                yield True
                self.join(rank, number)
                while not self.ended(number):
                    yield False
                yield True
            self.computing[rank].release()
            yield True
        engine.release()

    def close(self, rank, politely=False):
        engine = self.engines[rank]
        if not politely:
            engine.ask_to_close()
        yield True
        while not engine.try_close(politely=politely):
            yield False
        while not self.computing[rank].acquire(blocking=False):
            yield False
        self.computing[rank].release()

    def own(self, rank):
        """Moves of the thread that pays."""
        engine = self.engines[rank]
        while True:
            if not engine.owes:
                yield False
                continue
            yield True
            while not self.computing[rank].acquire(blocking=False):
                yield False
            if number := engine.join_owed():
                yield True
                self.join(rank, number)
                while not self.ended(number):
                    yield False
            self.computing[rank].release()
            yield True

    def run(self, choose):
        """Let the threads move in an order that `choose` gives; fails if none can move before all tasks are over."""
        mains = {key for key in self.threads if key[1] == "main"}
        num_idle = 0
        for _ in range(MOST_MOVES):
            if not mains:
                return
            keys = sorted(self.threads)
            key = keys[choose(len(keys))] if num_idle < 50 else keys[num_idle % len(keys)]
            moved = next(self.threads[key], None)
            if moved is None:
                del self.threads[key]
                mains.discard(key)
            num_idle = num_idle + 1 if moved is False else 0
            if num_idle > 100:
                state = [(Stage(e._get(Field.STAGE)).name, e._get(Field.HOLDS)) for e in self.engines]
                raise AssertionError(f"no engine can move: {state}, steps {self.steps}, orders {self.num_obeyed}")
        raise AssertionError("the engines move on and on")

    def check(self):
        """Every round was joined by all engines, under one key."""
        for number, keys in enumerate(zip(*self.joined, strict=False), 1):
            assert len({*keys}) == 1, f"round {number} has met weights {keys}"
        longest = max(map(len, self.joined))
        assert all(len(keys) == longest for keys in self.joined), "all engines take part in all rounds"


STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 1, 2])), max_size=8)


@st.composite
def plays(draw):
    """(number of engines, their steps, orders to all of them)."""
    size = draw(st.integers(1, 4))
    orders = []
    for version in range(1, draw(st.integers(1, 4))):
        match draw(st.sampled_from(["sleep", "nap", "nothing"])):
            case "sleep":
                orders += [("sleep", draw(st.booleans())), ("wake", None)]
            case "nap":
                orders.append(("nap", draw(st.integers(0, size - 1))))
        orders.append(("update", version))
    return size, [draw(STEPS) for _ in range(size)], orders


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plays(), st.randoms(use_true_random=False))
def test_whatever_order_moves_come_in_all_engines_end_their_tasks(drawn, rng):
    play = Play(*drawn)
    play.run(rng.randrange)
    play.run(rng.randrange)
    for _ in range(200):  # what is still owed is paid
        for key in list(play.threads):
            next(play.threads[key])
    play.check()


def test_an_engine_holds_only_if_all_have_the_same_weights():
    first, second = Play(2).engines
    first.open(1)
    assert not first.try_hold()
    second.open(2)
    assert not first.try_hold() and "different weights" in first.describe()
    second.ask_to_close()
    assert second.try_close()
    second.open(1)
    assert first.try_hold() and second.try_hold()


def test_an_engine_is_closed_only_when_no_other_holds_and_it_owes_nothing():
    first, second = Play(2).engines
    first.open(1)
    second.open(1)
    assert first.try_hold()
    second.ask_to_close()
    assert not second.try_close()
    assert first.try_hold(), "it may end what it has begun"
    first.begin_round()
    first.release()
    assert not first.try_hold() and not second.try_close() and second.owes
    assert second.join_owed() == 1 and second.join_owed() == 0
    assert second.try_close() and second.num_dummies == 1


def test_a_polite_engine_stays_open_while_another_has_work():
    first, second = Play(2).engines
    first.open(1)
    second.open(1)
    first.set_work(True)
    assert not second.try_close(politely=True) and first.try_hold()
    first.release()
    first.set_work(False)
    assert second.try_close(politely=True)


def test_no_round_is_begun_without_a_hold():
    engine = Play(1).engines[0]
    engine.open(1)
    with pytest.raises(AssertionError, match="does not hold"):
        engine.begin_round()
