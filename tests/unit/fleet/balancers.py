"""Balancers for tests, and requests for them."""

import random

from rollout_engine.fleet.plan.balancer import Balancer


def make(num_replicas, *args, **options):
    balancer = Balancer(*args, **options)
    for replica in range(num_replicas):
        balancer.add(replica)
    return balancer


def prompt_of(group, length=12):
    return random.Random(group).choices(range(50_000), k=length)


def send(balancer, prompt, *, num_kv_tokens=1, **options):
    replica = balancer.choose(prompt, **options)
    balancer.began(replica, num_kv_tokens)
    balancer.check_integrity()
    return replica
