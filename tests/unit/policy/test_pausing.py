"""Rollouts of an engine that is paused, put to sleep and resumed around them."""

import asyncio

import pytest

from rollout_engine.errors import LifecycleError
from rollout_engine.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)


def test_a_rollout_that_would_wait_for_ever_is_refused_and_leaves_nothing(rig):
    rig.policy.pause_generation()
    with pytest.raises(LifecycleError, match=r"rollout: .* PAUSED\(abort\).*; call resume_generation\(\) first"):
        rig.rollout()
    rig.policy.resume_generation()
    rig.policy.sleep()
    assert rig.policy.is_sleeping()
    with pytest.raises(LifecycleError, match=r"rollout: .* ASLEEP"):
        rig.rollout()
    rig.policy.wake_up()


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_an_arollout_waits_while_another_task_pauses_and_resumes(rig, mode):
    expected = rig.rollout(params=PARAMS)

    async def collect():
        return {int(group["group_id"][0]): group async for group in rig.policy.arollout(["one", "three"], PARAMS)}

    async def main():
        rig.policy.pause_generation(mode=mode)
        task = asyncio.create_task(collect())
        while rig.core.num_unfinished_requests < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not task.done() and rig.core.num_unfinished_requests == 2
        rig.policy.resume_generation()
        return await task

    groups = asyncio.run(main())
    for index, group in groups.items():
        assert group["tokens", "response"].tolist() == [expected["tokens", "response"][index].tolist()]


def test_leaving_an_arollout_that_waits_for_a_resume_aborts_it(rig):
    async def main():
        rig.policy.pause_generation(mode="keep")
        task = asyncio.create_task(anext(rig.policy.arollout(["one"], PARAMS)))
        while not rig.core.num_unfinished_requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    rig.policy.resume_generation()
