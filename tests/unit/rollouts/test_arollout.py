"""Groups as they finish: their order, a free event loop, and nothing left behind by a consumer that goes away."""

import asyncio
import threading

import pytest
import torch

from rollout_engine.base.errors import RewardError
from rollout_engine.base.sampling_params import SamplingParams

PROMPTS = ["one", "three", "a much longer prompt"]
SHORT = SamplingParams(max_tokens=6)
THREE_LENGTHS = [SamplingParams(max_tokens=k, ignore_eos=True, n=2) for k in (9, 2, 5)]


def lengths(prompts, completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def raises(*_):
    raise KeyError("gold")


def sampled(batch, row):
    return batch["tokens", "full"][row][batch["masks", "all_assistant_mask"][row]].tolist()


async def collect(stream):
    return [batch async for batch in stream]


def test_options_of_the_chat_template_reach_groups_too(rig):
    conversation = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "Yes"}]
    (group,) = asyncio.run(collect(rig.policy.arollout(conversation, SHORT, continue_final_message=True)))
    assert list(group["text", "prompt"]) == ["<|user|>h<eos><|assistant|>Yes"]


def test_groups_come_in_completion_order_and_are_the_rollouts_own(rig):
    whole = rig.rollout(PROMPTS, THREE_LENGTHS, seed=3, columns={"answer": [1, 2, 3]}, reward_fn=lengths)
    stream = rig.policy.arollout(PROMPTS, THREE_LENGTHS, seed=3, columns={"answer": [1, 2, 3]}, reward_fn=lengths)
    groups = asyncio.run(collect(stream))
    assert [group["group_id"].tolist() for group in groups] == [[1, 1], [2, 2], [0, 0]]
    for group in groups:
        rows = [row for row in range(6) if whole["group_id"][row] == group["group_id"][0]]
        assert [sampled(group, i) for i in range(2)] == [sampled(whole, row) for row in rows]
        assert torch.equal(group["next", "reward"], whole["next", "reward"][rows])
        assert list(group["answer"]) == [whole[row]["answer"] for row in rows]


def test_the_loop_stays_free_while_the_engine_steps(rig):
    async def main():
        loop, stepped = asyncio.get_running_loop(), asyncio.Event()
        answered = threading.Event()

        def before_step():
            loop.call_soon_threadsafe(stepped.set)
            assert answered.wait(timeout=300), "the loop was blocked during a step"

        async def other_work():
            await stepped.wait()
            answered.set()

        rig.executor.before_step = before_step
        await asyncio.gather(other_work(), collect(rig.policy.arollout(PROMPTS, SHORT)))

    asyncio.run(main())
    del rig.executor.before_step


def test_leaving_early_aborts_what_is_left(rig):
    async def main():
        stream = rig.policy.arollout(PROMPTS, THREE_LENGTHS)
        first = await anext(stream)
        await stream.aclose()
        return first

    assert asyncio.run(main())["group_id"][0] == 1
    rig.assert_clean()


def test_a_cancelled_consumer_aborts_what_is_left(rig):
    async def main():
        stepping, release = threading.Event(), threading.Event()

        def before_step():
            stepping.set()
            release.wait(timeout=300)

        rig.executor.before_step = before_step
        task = asyncio.create_task(collect(rig.policy.arollout(PROMPTS, THREE_LENGTHS)))
        await asyncio.to_thread(stepping.wait, 300)
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert rig.executor.num_steps == 1
    del rig.executor.before_step


def test_a_consumer_cancelled_while_a_reward_waits_does_not_hang(rig):
    async def main():
        called = asyncio.Event()

        async def never(*_):
            called.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(collect(rig.policy.arollout("x", SHORT, reward_fn=never)))
        await called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, timeout=300)

    asyncio.run(main())


def test_async_rewards_run_on_the_callers_loop(rig):
    async def main():
        loops = []

        async def reward(prompts, completions, completion_ids):
            loops.append(asyncio.get_running_loop())
            return [1.0, 2.0]

        groups = await collect(rig.policy.arollout(PROMPTS, THREE_LENGTHS, reward_fn=reward))
        assert loops == [asyncio.get_running_loop()] * 3
        assert all(group["next", "reward"].flatten().tolist() == [1.0, 2.0] for group in groups)

    asyncio.run(main())


def test_a_bad_reward_ends_the_iteration(rig):
    with pytest.raises(RewardError, match=r"prompts\[1\]: the reward function raised KeyError"):
        asyncio.run(collect(rig.policy.arollout(PROMPTS, THREE_LENGTHS, reward_fn=raises)))


def test_several_tasks_share_one_policy(rig):
    async def main():
        streams = [rig.policy.arollout(PROMPTS, THREE_LENGTHS, seed=i % 2) for i in range(4)]
        return await asyncio.gather(*map(collect, streams))

    results = asyncio.run(main())
    texts = [{int(g["group_id"][0]): list(g["text", "response"]) for g in groups} for groups in results]
    assert texts[0] == texts[2] != texts[1] == texts[3]
