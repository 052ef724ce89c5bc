"""Clients that mean no good beside one that streams: it has its tokens, and the core holds no more than before."""

import asyncio

import pytest

from rollout_engine import AsyncLLM
from tests.faults.attacks import ATTACKS
from tests.faults.bystander import Bystander, attack
from tests.faults.clean import assert_clean
from tests.faults.deaths import OPTIONS


@pytest.mark.slow
def test_every_attack_is_refused_and_a_bystander_has_its_tokens(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS, log_stats=False) as engine:
        bystander = Bystander(engine)

        async def run():
            await bystander.prepare()
            before = bystander.held()
            await bystander.stream(asyncio.ensure_future(attack(engine.address, dict.fromkeys(ATTACKS, 100))))
            await assert_clean(engine)
            return before, bystander.held()

        before, after = asyncio.run(run())
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
