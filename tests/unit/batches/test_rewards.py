"""A reward function gives finite numbers, or one typed error that names the group."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from rollout_engine.base.errors import RewardError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.batches import rewards
from rollout_engine.batches.rewards import RewardCaller


def group(num=2):
    samples = [
        CompletionOutput(i, f"text {i}", [i, 9], None, None, None, None, "stop", None, [], i) for i in range(num)
    ]
    return RequestOutput("r", "prompt", [1], None, samples, True, 0)


def rewards_of(reward_fn, columns=None, num=2):
    caller = RewardCaller(reward_fn)
    try:
        caller.check_columns(columns or {})
        return caller.start(3, "the prompt", group(num), columns or {}).result(timeout=300).total
    finally:
        caller.close()


def later(answer):
    async def reward(prompts, completions, completion_ids):
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return reward


def now(answer):
    def reward(prompts, completions, completion_ids):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return reward


def test_the_function_sees_lists_of_the_groups_size():
    seen = {}

    def reward(prompts, completions, completion_ids, answer):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        return [0.0, 1.0]

    assert rewards_of(reward, {"answer": 42}) == [0.0, 1.0]
    assert seen == {
        "prompts": ["the prompt"] * 2,
        "completions": ["text 0", "text 1"],
        "ids": [[0, 9], [1, 9]],
        "answer": [42, 42],
    }


def test_what_a_function_writes_to_its_arguments_reaches_nobody():
    finished, prompt, gold = group(), [{"role": "user", "content": "hi"}], {"answer": [1], "mask": np.ones(2)}

    def reward(prompts, completions, completion_ids, gold):
        prompts[0][0]["content"] = completions[0] = "overwritten"
        completion_ids[0][:] = [7]
        gold[0]["answer"].append(2)
        gold[0]["mask"][:] = 0
        assert (prompts[1], completions[1], completion_ids[1]) == (
            [{"role": "user", "content": "hi"}],
            [{"role": "assistant", "content": "text 1"}],
            [1, 9],
        )
        assert gold[1]["answer"] == [1] and gold[1]["mask"].tolist() == [1, 1], "samples share a copy"
        return [0.0, 0.0]

    caller = RewardCaller(reward)
    caller.start(0, prompt, finished, {"gold": gold}).result(timeout=300)
    assert [(sample.text, sample.token_ids) for sample in finished.outputs] == [("text 0", [0, 9]), ("text 1", [1, 9])]
    assert prompt == [{"role": "user", "content": "hi"}]
    assert gold["answer"] == [1] and gold["mask"].tolist() == [1, 1]


@pytest.mark.parametrize("how", [now, later])
@pytest.mark.parametrize("answer", [[1, 0], (1.0, 0.0), [True, False], np.array([1.0, 0]), torch.tensor([1, 0])])
def test_anything_that_lists_numbers_will_do(how, answer):
    rewards = rewards_of(how(answer))
    assert rewards == [1.0, 0.0]
    assert all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize("how", [now, later])
@pytest.mark.parametrize(
    "answer,message",
    [
        (ValueError("no gold answer"), r"prompts\[3\]: the reward function raised ValueError: no gold answer"),
        ([1.0], r"prompts\[3\]: the reward function returned 1 rewards, not 2"),
        ([1.0] * 3, r"prompts\[3\]: the reward function returned 3 rewards, not 2"),
        ([1.0, float("nan")], r"prompts\[3\], sample 1: the reward is nan, not a finite number"),
        ([float("inf"), 1.0], r"prompts\[3\], sample 0: the reward is inf, not a finite number"),
        ([1.0, None], r"prompts\[3\], sample 1: the reward is None, not a finite number"),
        ([1.0, "1.0"], r"prompts\[3\], sample 1: the reward is '1.0', not a finite number"),
        (None, r"prompts\[3\]: the reward function returned NoneType, not a list of 2 numbers"),
        (1.0, r"prompts\[3\]: the reward function returned float, not a list of 2 numbers"),
        ("10", r"prompts\[3\]: the reward function returned str, not a list of 2 numbers"),
    ],
)
def test_what_is_no_reward_is_a_typed_error_naming_the_group(how, answer, message):
    with pytest.raises(RewardError, match=message):
        rewards_of(how(answer))


def test_the_users_own_exception_is_the_cause():
    with pytest.raises(RewardError) as caught:
        rewards_of(now(KeyError("gold")))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_column_that_the_function_does_not_take_is_a_typed_error():
    with pytest.raises(RewardError, match="No reward function takes the column 'answer' \\(asked: reward\\)"):
        rewards_of(now([0, 0]), {"answer": 1})


def test_async_rewards_run_side_by_side_on_one_private_loop():
    met = []

    async def reward(prompts, completions, completion_ids):
        barrier.append(asyncio.get_running_loop())
        while len(barrier) < 2:
            await asyncio.sleep(0)
        met.append(threading.current_thread().name)
        return [0.0, 0.0]

    barrier = []
    caller = RewardCaller(reward)
    futures = [caller.start(i, "p", group(), {}) for i in range(2)]
    assert [future.result(timeout=300).total for future in futures] == [[0.0, 0.0]] * 2
    assert barrier[0] is barrier[1] and set(met) == {"rewards"}
    caller.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards"]


def test_closing_cancels_what_still_runs():
    cancelled = threading.Event()

    async def reward(prompts, completions, completion_ids):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    caller = RewardCaller(reward)
    future = caller.start(0, "p", group(), {})
    caller.close()
    assert cancelled.is_set() or future.cancelled()


def test_plain_functions_need_no_loop():
    caller = RewardCaller(now([1, 1]))
    caller.start(0, "p", group(), {}).result()
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards"]
    caller.close()


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit("no words")


def lazily(problem):
    """Rewards that raise when they are read."""

    def values():
        yield 1.0
        raise problem

    return values


@pytest.mark.parametrize(
    "problem", [SystemExit(1), ZeroDivisionError("1"), Unspeakable()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_what_the_users_code_raises_is_a_typed_error_wherever_it_runs(problem, is_async, is_lazy):
    def reward(completions):
        if is_lazy:
            return lazily(problem)()
        raise problem

    async def async_reward(completions):
        return reward(completions)

    text = "<Unspeakable: no words>" if isinstance(problem, Unspeakable) else str(problem)
    message = f"prompts[3]: the reward function raised {type(problem).__name__}: {text}"
    with pytest.raises(RewardError) as caught:
        rewards_of(async_reward if is_async else reward)
    assert str(caught.value) == message and caught.value.__cause__ is problem


def test_a_coroutine_that_exits_fails_its_group_and_no_other():
    async def reward(prompts, completions, completion_ids):
        if completions[0] == "leave":
            raise SystemExit(3)
        return [1.0]

    caller, bad = RewardCaller(reward), group(1)
    bad.outputs[0].text = "leave"
    with pytest.raises(RewardError, match=r"prompts\[0\]: the reward function raised SystemExit: 3"):
        caller.start(0, "the prompt", bad, {}).result(timeout=300)
    assert caller.start(1, "the prompt", group(1), {}).result(timeout=300).total == [1.0]
    caller.close()


def test_a_coroutine_that_blocks_its_loop_holds_no_end(monkeypatch, caplog):
    monkeypatch.setattr(rewards, "END_SECONDS", 0.0)
    begun, released = threading.Event(), threading.Event()

    async def judge(prompts, completions, completion_ids):
        begun.set()
        released.wait()

    caller = RewardCaller(judge)
    caller.start(0, "the prompt", group(), {})
    begun.wait()
    caller.close()
    assert "judge blocks its event loop and was left running" in caplog.text
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rewards"]
    released.set()
    thread.join()
