"""Rollouts of an engine that is paused, put to sleep and resumed around them."""

import asyncio

import pytest

from rollout_engine.base.errors import LifecycleError, RetryableError
from rollout_engine.base.sampling_params import SamplingParams

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


@pytest.mark.quick(1)
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


CUT = r"prompts\[0\], sample 0 was aborted after [1-9] tokens by a pause, .* call rollout again once the engine runs"


def test_a_rollout_cut_by_an_abort_raises_and_returns_no_group(rig, monkeypatch):
    steps, turn = iter(range(100)), rig.engine.frontend.client.turn

    def pause_before_the_last_step(has_news):
        if next(steps) == 4:
            rig.policy.pause_generation(mode="abort")
        return turn(has_news)

    monkeypatch.setattr(rig.engine.frontend.client, "turn", pause_before_the_last_step)
    with pytest.raises(RetryableError, match=CUT):
        rig.rollout("one", PARAMS, num_samples=2)
    rig.policy.resume_generation()
    monkeypatch.undo()


def test_an_arollout_yields_whole_groups_and_raises_for_one_cut_by_an_abort(rig):
    async def main():
        params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (30, 2)]
        stream = rig.policy.arollout(["one", "three"], params)
        whole = await anext(stream)
        rig.policy.pause_generation(mode="abort")
        with pytest.raises(RetryableError, match=CUT):
            await anext(stream)
        rig.policy.resume_generation()
        return whole

    whole = asyncio.run(main())
    assert whole["group_id"].tolist() == [1] and list(whole["finish_reason"]) == ["length"]
