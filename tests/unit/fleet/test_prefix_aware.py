import random
from collections import Counter

import pytest

from rollout_engine.fleet.plan.balancer import Balancer
from tests.unit.fleet.balancers import make, prompt_of, send

NUM_GROUPS, GROUP_SIZE = 64, 8
ARRIVALS = {"group after group": 1, "one of each group in turn": 1, "shuffled": 2}
"""Groups by which the load of a replica may differ from the mean: who is placed early may bring more than is known."""


def arrivals(order):
    if order == "one of each group in turn":
        return [*range(NUM_GROUPS)] * GROUP_SIZE
    groups = [group for group in range(NUM_GROUPS) for _ in range(GROUP_SIZE)]
    if order == "shuffled":
        random.Random(0).shuffle(groups)
    return groups


def share_at_home(replicas_of_groups):
    """Share of the requests that went where most of their group did."""
    at_home = sum(max(Counter(replicas).values()) for replicas in replicas_of_groups.values())
    return at_home / sum(map(len, replicas_of_groups.values()))


@pytest.mark.quick(4)
@pytest.mark.parametrize("num_replicas", [2, 4, 16])
@pytest.mark.parametrize("order", ARRIVALS)
def test_groups_stay_together_and_replicas_are_even_when_all_requests_are_in_flight(order, num_replicas):
    balancer, went = make(num_replicas), {group: [] for group in range(NUM_GROUPS)}
    for group in arrivals(order):
        went[group].append(send(balancer, prompt_of(group)))
    assert share_at_home(went) >= 0.98
    loads, mean = balancer.stats.num_requests.values(), NUM_GROUPS * GROUP_SIZE / num_replicas
    assert max(max(loads) - mean, mean - min(loads)) <= ARRIVALS[order] * GROUP_SIZE


@pytest.mark.quick(3)
@pytest.mark.parametrize("num_replicas", [2, 4, 16])
@pytest.mark.parametrize("order", ARRIVALS)
def test_groups_stay_together_and_replicas_are_even_while_requests_come_and_go(order, num_replicas):
    balancer, went, in_flight = make(num_replicas), {group: [] for group in range(NUM_GROUPS)}, []
    chance, done, num_in_flight = random.Random(1), Counter(), 8 * num_replicas
    for group in arrivals(order):
        replica = send(balancer, prompt_of(group))
        went[group].append(replica)
        in_flight.append(replica)
        done[replica] += 1
        if len(in_flight) > num_in_flight:
            balancer.ended(in_flight.pop(chance.randrange(len(in_flight))), 1)
    assert share_at_home(went) >= 0.98
    assert max(done.values()) <= 1.5 * NUM_GROUPS * GROUP_SIZE / num_replicas


def test_a_prefix_that_all_prompts_share_does_not_overload_its_replica():
    balancer, system_prompt = make(16), list(range(8))
    for group in range(512):
        send(balancer, system_prompt + prompt_of(group))
    loads = sorted(balancer.stats.num_requests.values())
    mean = 512 / 16
    assert loads[-1] <= 1.5 * (mean + 8) + 1
    assert loads[-2] - loads[0] <= 1
    assert balancer.stats.num_fallbacks == balancer.stats.decisions["requests"] > 0


def test_a_longer_prefix_length_tells_prompts_behind_a_system_prompt_apart():
    prompts = [[*range(8), *prompt_of(group)] for group in range(32)]
    assert len({make(4).choose(prompt) for prompt in prompts}) == 1
    assert len({make(4, prefix_length=9).choose(prompt) for prompt in prompts}) == 4


def test_only_the_first_tokens_count():
    balancer = make(16)
    for group in range(20):
        home = send(balancer, prompt_of(group))
        assert send(balancer, [*prompt_of(group)[:8], 1, 2, 3]) == home


def test_prompts_shorter_than_the_prefix_have_a_home():
    homes = {length: make(64).choose([1] * length) for length in range(1, 8)}
    assert homes == {length: make(64).choose([1] * length) for length in range(1, 8)}
    assert len(set(homes.values())) > 1


def test_without_a_prompt_the_next_strategy_decides():
    balancer = make(2)
    assert {send(balancer, ()), send(balancer, ())} == {0, 1}
    assert balancer.stats.decisions == {"requests": 2}


def test_a_replica_that_leaves_moves_only_its_own_prefixes_and_spreads_them():
    def homes(replicas):
        balancer = Balancer("prefix-aware")
        for replica in replicas:
            balancer.add(replica)
        return [balancer.choose(prompt_of(group)) for group in range(1000)]

    before, after = homes(range(10)), homes([replica for replica in range(10) if replica != 4])
    moved = [new for old, new in zip(before, after, strict=True) if old == 4]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 4)
    assert 0 < len(moved) < 250 and len(set(moved)) >= 5


def test_known_prefixes_stay_when_a_replica_comes_and_only_the_lost_ones_move_when_one_goes():
    balancer = make(8)
    before = [balancer.choose(prompt_of(group)) for group in range(500)]
    balancer.add(8)
    assert [balancer.choose(prompt_of(group)) for group in range(500)] == before
    balancer.remove(3)
    after = [balancer.choose(prompt_of(group)) for group in range(500)]
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {3}
    assert 3 not in after


def test_a_new_replica_is_filled_by_new_prefixes():
    balancer = make(3)
    for group in range(30):
        send(balancer, prompt_of(group))
    balancer.add(3)
    for group in range(30, 60):
        send(balancer, prompt_of(group))
    loads = balancer.stats.num_requests
    assert max(loads.values()) - min(loads.values()) <= 1


def test_a_prefix_keeps_its_home_while_that_is_excluded():
    balancer = make(4)
    home = send(balancer, prompt_of(0))
    assert send(balancer, prompt_of(0), excluding=[home]) != home
    assert send(balancer, prompt_of(0)) == home


def test_a_prefix_keeps_its_home_while_that_is_overloaded():
    balancer = make(4)
    home = send(balancer, prompt_of(0))
    for _ in range(30):
        balancer.began(home, 1)
    assert send(balancer, prompt_of(0)) != home
    for _ in range(30):
        balancer.ended(home, 1)
    assert send(balancer, prompt_of(0)) == home


def test_an_infinite_threshold_never_moves_a_prefix():
    balancer = make(2, "prefix-aware", overload_threshold=float("inf"))
    assert len({send(balancer, prompt_of(0)) for _ in range(200)}) == 1
