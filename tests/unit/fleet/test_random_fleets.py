import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_engine.fleet.plan import strategies
from rollout_engine.fleet.plan.balancer import STRATEGIES, Balancer
from tests.unit.fleet.balancers import make, prompt_of


class Looked:
    """An empty set of excluded replicas that counts how many replicas are looked up in it."""

    def __init__(self):
        self.times = 0

    def __contains__(self, replica):
        self.times += 1
        return False


@pytest.mark.quick(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decision_among_a_thousand_replicas_looks_at_few(strategy):
    balancer, chance, in_flight = make(1000, strategy), random.Random(0), []
    for step in range(5000):
        looked = Looked()
        replica = balancer.choose(prompt_of(chance.randrange(3000)), excluding=looked)
        assert looked.times <= 1 + strategies._MAX_PROBES
        in_flight.append((replica, chance.randrange(1000)))
        balancer.began(*in_flight[-1])
        if step > 3000:
            balancer.ended(*in_flight.pop(chance.randrange(len(in_flight))))
    balancer.check_integrity()


class RandomFleet(RuleBasedStateMachine):
    """Random events, beside a ledger of what serves and what is in flight."""

    replicas = st.integers(0, 5)

    @initialize(order=st.permutations(STRATEGIES), length=st.integers(1, len(STRATEGIES)))
    def start(self, order, length):
        self.balancer = Balancer(order[:length], prefix_length=2)
        self.serving, self.in_flight, self.num_chosen = set(), [], 0

    @rule(replica=replicas)
    def come_or_go(self, replica):
        if replica in self.serving:
            self.serving.remove(replica)
            self.balancer.remove(replica)
        else:
            self.serving.add(replica)
            self.balancer.add(replica)

    @rule(
        prompt=st.lists(st.integers(0, 2), max_size=3),
        session_id=st.sampled_from([None, None, "a", "b"]),
        excluding=st.sets(replicas),
        num_kv_tokens=st.integers(0, 50),
        times=st.sampled_from([1, 1, 1, 30]),
    )
    def send(self, prompt, session_id, excluding, num_kv_tokens, times):
        for _ in range(times):
            if not self.serving - excluding:
                with pytest.raises(LookupError, match="No replica is left"):
                    self.balancer.choose(prompt, session_id=session_id, excluding=excluding)
                return
            replica = self.balancer.choose(prompt, session_id=session_id, excluding=excluding)
            assert replica in self.serving - excluding
            self.num_chosen += 1
            self.balancer.began(replica, num_kv_tokens)
            self.in_flight.append((replica, num_kv_tokens))

    @precondition(lambda self: self.in_flight)
    @rule(where=st.floats(0, 1, exclude_max=True), times=st.sampled_from([1, 1, 20]))
    def end(self, where, times):
        for _ in range(min(times, len(self.in_flight))):
            self.balancer.ended(*self.in_flight.pop(int(where * len(self.in_flight))))

    @invariant()
    def counts_are_those_of_the_ledger(self):
        self.balancer.check_integrity()
        stats = self.balancer.stats
        num_requests = Counter({replica: 0 for replica in self.serving})
        num_kv_tokens = Counter({replica: 0 for replica in self.serving})
        for replica, tokens in self.in_flight:
            num_requests[replica] += 1
            num_kv_tokens[replica] += tokens
        assert stats.num_requests == dict(num_requests)
        assert {replica: tokens for replica, tokens in stats.num_kv_tokens.items() if tokens} == dict(+num_kv_tokens)
        assert sum(stats.decisions.values()) == self.num_chosen


TestRandomFleet = RandomFleet.TestCase
TestRandomFleet.settings = settings(max_examples=60, stateful_step_count=40)
