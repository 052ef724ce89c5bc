import subprocess
import sys

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.fleet.plan import strategies
from rollout_engine.fleet.plan.balancer import STRATEGIES, Balancer
from tests.unit.fleet.balancers import make, prompt_of, send

DECISIONS = """
import random
from rollout_engine.fleet.plan.balancer import Balancer
chance = random.Random(0)
for name in ("prefix-aware", "requests", "kv-cache", "round-robin"):
    balancer = Balancer(name)
    for replica in range(16):
        balancer.add(replica)
    for _ in range(300):
        replica = balancer.choose(chance.choices(range(3), k=9), session_id=chance.choice([None, "a", "b"]))
        balancer.began(replica, chance.randrange(100))
        print(replica)
"""


def test_every_process_decides_alike():
    def run(hash_seed):
        command, environment = [sys.executable, "-c", DECISIONS], {"PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = ":".join(sys.path)
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    decisions = run("1")
    assert len(set(decisions.split())) == 16
    assert decisions == run("2")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_session_stays_where_its_first_turn_went(strategy):
    balancer = make(8, strategy)
    home = send(balancer, prompt_of(0), session_id="s")
    for turn in range(1, 60):
        assert send(balancer, prompt_of(turn), session_id="s") == home
    assert balancer.stats.decisions == {strategy: 1, "session": 59}
    balancer.remove(home)
    new_home = send(balancer, prompt_of(60), session_id="s")
    balancer.add(home)
    assert home != new_home == send(balancer, prompt_of(61), session_id="s")


def test_a_session_stays_while_its_replica_is_excluded():
    balancer = make(8, "requests")
    home = send(balancer, prompt_of(0), session_id="s")
    assert send(balancer, prompt_of(0), session_id="s", excluding={home}) != home
    assert send(balancer, prompt_of(0), session_id="s") == home


def test_the_sessions_and_prefixes_used_last_are_remembered(monkeypatch):
    monkeypatch.setattr(strategies, "_MAX_HOMES", 3)
    balancer = make(5)
    homes = {name: send(balancer, prompt_of(i), session_id=name) for i, name in enumerate("abc")}
    balancer.choose(prompt_of(0), session_id="a")
    send(balancer, prompt_of(3), session_id="d")
    decided = balancer.stats.decisions["session"]
    assert all(balancer.choose(session_id=name) == homes[name] for name in "ac")
    assert balancer.stats.decisions["session"] == decided + 2
    balancer.choose(session_id="b")
    assert balancer.stats.decisions["session"] == decided + 2
    balancer.check_integrity()


def test_a_session_that_moved_counts_as_used_last(monkeypatch):
    monkeypatch.setattr(strategies, "_MAX_HOMES", 2)
    balancer = make(3, "requests")
    lost, home = send(balancer, (), session_id="a"), send(balancer, (), session_id="b")
    balancer.remove(lost)
    new_home = send(balancer, (), session_id="a", excluding={home})
    send(balancer, (), session_id="c")
    assert balancer.choose(session_id="a") == new_home
    assert balancer.stats.decisions == {"requests": 4, "session": 1}


def test_round_robin_gives_each_replica_its_turn():
    balancer = make(4, "round-robin")
    assert [balancer.choose() for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    balancer.remove(2)
    assert [balancer.choose() for _ in range(3)] == [3, 0, 1]
    balancer.add(2)
    assert [balancer.choose(excluding={3}) for _ in range(4)] == [2, 0, 1, 2]


def test_round_robin_passes_over_an_overloaded_replica():
    balancer = make(3, ("round-robin", "requests"))
    for _ in range(60):
        balancer.began(1, 1)
    balancer.began(0, 1)
    assert [balancer.choose() for _ in range(3)] == [0, 2, 2]
    assert balancer.stats.decisions == {"round-robin": 2, "requests": 1}


def test_requests_takes_the_replica_with_the_fewest_and_idle_ones_in_turn():
    balancer = make(3, "requests")
    assert [send(balancer, ()) for _ in range(4)] == [0, 1, 2, 0]
    balancer.ended(1, 1)
    assert send(balancer, ()) == 1
    balancer.ended(2, 1)
    assert send(balancer, (), excluding={2}) == 1


def test_kv_cache_takes_the_replica_with_the_fewest_tokens():
    balancer = make(3, "kv-cache")
    chosen = [send(balancer, (), num_kv_tokens=tokens) for tokens in (900, 300, 500, 100, 100, 100)]
    assert chosen == [0, 1, 2, 1, 1, 2]
    balancer.ended(0, 900)
    assert send(balancer, ()) == 0


def test_the_next_strategy_decides_where_the_first_passes():
    balancer = make(3, ("prefix-aware", "kv-cache"))
    home = send(balancer, prompt_of(0))
    first, second = sorted({0, 1, 2} - {home})
    for _ in range(40):
        balancer.began(home, 0)
    balancer.began(first, 10)
    assert send(balancer, prompt_of(0)) == second
    assert balancer.stats.decisions == {"prefix-aware": 1, "kv-cache": 1}
    assert balancer.stats.num_fallbacks == 1


def test_where_all_strategies_pass_the_fewest_requests_decide():
    balancer = make(2, "prefix-aware")
    home = send(balancer, prompt_of(0))
    for _ in range(100):
        balancer.began(home, 0)
    assert send(balancer, prompt_of(0)) == 1 - home
    assert send(balancer, prompt_of(0), excluding={1 - home}) == home


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_replica_left_is_an_error(strategy):
    balancer = Balancer(strategy)
    with pytest.raises(LookupError, match="none serves"):
        balancer.choose(prompt_of(0), session_id="s")
    balancer.add(0)
    balancer.add(1)
    with pytest.raises(LookupError, match="all 2 that serve are excluded"):
        balancer.choose(prompt_of(0), session_id="s", excluding=(0, 1))
    balancer.remove(0)
    assert balancer.choose(prompt_of(0), session_id="s", excluding=(0,)) == 1


def test_requests_of_a_removed_replica_count_until_they_end():
    balancer = make(2, "requests")
    balancer.began(0, 30)
    balancer.began(0, 40)
    balancer.remove(0)
    assert balancer.stats.num_requests == {0: 2, 1: 0}
    balancer.ended(0, 30)
    balancer.add(0)
    assert (balancer.stats.num_requests, balancer.stats.num_kv_tokens) == ({0: 1, 1: 0}, {0: 40, 1: 0})
    balancer.remove(0)
    balancer.ended(0, 40)
    assert balancer.stats.num_requests == {1: 0}
    balancer.check_integrity()


def test_an_end_without_a_beginning_is_a_fault_of_the_caller():
    with pytest.raises(AssertionError, match="replica 1: more has ended than began"):
        make(2).ended(1, 5)


REFUSED = {
    "near name": (dict(strategies=("prefix-aware", "request")), r"strategy 'request'. Did you mean 'requests'\?"),
    "other spelling": (dict(strategies="prefix_aware"), r"Did you mean 'prefix-aware'\?"),
    "far name": (dict(strategies="best"), "Known: kv-cache, prefix-aware, requests, round-robin"),
    "no text": (dict(strategies=(None,)), "strategy 'None'"),
    "no name": (dict(strategies=None), "strategies=None is not allowed: must be one or more of"),
    "none": (dict(strategies=()), r"strategies=\(\) is not allowed: must be one or more of"),
    "twice": (dict(strategies=("requests", "requests")), "each once"),
    "no prefix": (dict(prefix_length=0), "prefix_length=0 is not allowed: must be an int of at least 1"),
    "part of a token": (dict(prefix_length=2.5), "an int of at least 1"),
    "below the mean": (dict(overload_threshold=0.9), "overload_threshold=0.9 is not allowed: must be a number of at"),
    "not a number": (dict(overload_threshold=float("nan")), "a number of at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        Balancer(**options)
