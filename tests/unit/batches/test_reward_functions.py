"""Reward functions written for TRL or by position get what they ask for; a list of them is summed by weight."""

import asyncio
import functools
import threading

import pytest

from rollout_engine.base.errors import RequestError, RewardError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.batches.reward_functions import LARGEST_REWARD
from rollout_engine.batches.rewards import RewardCaller

CONVERSATION = [{"role": "user", "content": "hi"}]


def rewards_of(reward_fn, columns=None, prompt="the prompt", weights=None, num=2):
    samples = [
        CompletionOutput(i, f"text {i}", [i, 9], None, None, None, None, "stop", None, [], i) for i in range(num)
    ]
    caller = RewardCaller(reward_fn, weights=weights)
    try:
        output = RequestOutput("r", "prompt", [1], None, samples, True, 0)
        caller.check_columns(columns or {})
        return caller.start(3, prompt, output, columns or {}).result(timeout=300)
    finally:
        caller.close()


SEEN = {}


def note(**given):
    SEEN.clear()
    SEEN.update(given)
    return [0.0, 0.0]


THREE = {"prompts": ["the prompt"] * 2, "completions": ["text 0", "text 1"], "completion_ids": [[0, 9], [1, 9]]}
ANSWER = {"answer": [42, 42]}


def everything(**kwargs):
    return note(**kwargs)


def everything_by_name(*, prompts, completions, completion_ids, answer):
    return note(prompts=prompts, completions=completions, completion_ids=completion_ids, answer=answer)


def in_order(prompts, completions, completion_ids, answer):
    return note(prompts=prompts, completions=completions, completion_ids=completion_ids, answer=answer)


def by_place_alone(a, b, c, /, **columns):
    return note(prompts=a, completions=b, completion_ids=c, **columns)


def two_places(a, b, /, completion_ids, answer):
    return note(prompts=a, completions=b, completion_ids=completion_ids, answer=answer)


def rest_by_place(prompts, *rest, answer):
    return note(prompts=prompts, completions=rest[0], completion_ids=rest[1], answer=answer)


def any_place(*lists, **columns):
    return note(**dict(zip(THREE, lists, strict=True)), **columns)


@functools.wraps(everything_by_name)
def wrapped(*args, **kwargs):
    return everything_by_name(*args, **kwargs)


class Judge:
    def __call__(self, completions, answer, **kwargs):
        return note(completions=completions, answer=answer, **kwargs)


FULL = [everything, everything_by_name, in_order, by_place_alone, two_places, any_place, rest_by_place, wrapped]
FULL.append(Judge())
FULL.append(
    functools.partial(
        lambda scale, prompts, completions, completion_ids, answer: note(
            prompts=prompts, completions=completions, completion_ids=completion_ids, answer=answer
        ),
        2.0,
    )
)


@pytest.mark.parametrize("function", FULL)
def test_a_function_gets_all_lists_however_it_takes_them(function):
    rewards_of(function, {"answer": 42})
    assert SEEN == THREE | ANSWER


@pytest.mark.parametrize(
    "function,expected",
    [
        (lambda completions, **kwargs: note(completions=completions, more=sorted(kwargs)), {"completions"}),
        (lambda completions: note(completions=completions), {"completions"}),
        (
            lambda completion_ids, prompts: note(completion_ids=completion_ids, prompts=prompts),
            {"completion_ids", "prompts"},
        ),
        (lambda prompts, completions: note(prompts=prompts, completions=completions), {"prompts", "completions"}),
        (lambda completions, scale=1, bonus=0: note(completions=completions), {"completions"}),
        (lambda *, completion_ids: note(completion_ids=completion_ids), {"completion_ids"}),
        (lambda completions, *rest: note(completions=completions, rest=rest), {"completions"}),
    ],
)
def test_a_function_gets_by_name_what_it_names(function, expected):
    rewards_of(function)
    assert {name: SEEN[name] for name in expected} == {name: THREE[name] for name in expected}
    if "more" in SEEN:
        assert SEEN["more"] == ["completion_ids", "prompts"]


def test_a_column_among_the_first_arguments_is_a_column():
    rewards_of(lambda prompts, completions, answer: note(completions=completions, answer=answer), {"answer": 42})
    assert SEEN == {"completions": THREE["completions"]} | ANSWER


def test_completions_of_a_conversation_are_conversations():
    rewards_of(everything, prompt=CONVERSATION)
    assert SEEN["prompts"] == [CONVERSATION] * 2
    assert SEEN["completions"] == [[{"role": "assistant", "content": f"text {i}"}] for i in range(2)]
    rewards_of(everything, prompt={"messages": CONVERSATION})
    assert SEEN["completions"] == THREE["completions"]


def first(completions, **kwargs):
    return [1.0, 2.0]


def second(completions, **kwargs):
    return [10.0, None]


async def third(completions, **kwargs):
    await asyncio.sleep(0)
    return [None, 100]


@pytest.mark.parametrize("weights,total", [(None, [11.0, 102.0]), ([2, 0.5, -1], [7.0, -96.0])])
def test_a_list_is_summed_by_weight_over_the_functions_that_apply(weights, total):
    rewards = rewards_of([first, second, third], weights=weights)
    assert rewards.total == total
    assert rewards.by_function == {"first": [1.0, 2.0], "second": [10.0, None], "third": [None, 100.0]}


def test_functions_of_one_name_are_told_apart():
    twice = [first, functools.partial(first), Judge(), lambda *_: [0, 0]]
    assert list(rewards_of(twice, {"answer": 1}).by_function) == ["first", "first_2", "Judge", "<lambda>"]
    assert rewards_of(first).by_function == {}


def test_each_function_of_a_list_gets_the_columns_that_it_names():
    def exact(completions, answer):
        return [float(answer == [42, 42])] * 2

    def short(completions, limit):
        return [float(limit == [7, 7])] * 2

    assert rewards_of([exact, short], {"answer": 42, "limit": 7}).total == [2.0, 2.0]


def test_functions_of_a_list_do_not_see_what_another_wrote():
    def greedy(completion_ids, **kwargs):
        completion_ids[0].clear()
        return [0, 0]

    def honest(completion_ids, **kwargs):
        return [len(ids) for ids in completion_ids]

    assert rewards_of([greedy, honest]).total == [2, 2]


def test_async_functions_of_a_list_run_side_by_side():
    meeting = []

    async def waits(completions, **kwargs):
        meeting.append(threading.current_thread().name)
        while len(meeting) < 2:
            await asyncio.sleep(0)
        return [1.0, 1.0]

    assert rewards_of([waits, waits]).total == [2.0, 2.0] and meeting == ["rewards"] * 2


def fails(completions, **kwargs):
    raise KeyError("gold")


@pytest.mark.parametrize(
    "reward_fn,columns,message",
    [
        ([first, fails], {}, r"prompts\[3\]: the reward function 'fails' raised KeyError: 'gold'"),
        ([third, fails], {}, r"prompts\[3\]: the reward function 'fails' raised KeyError: 'gold'"),
        ([first, lambda *_: [1]], {}, r"prompts\[3\]: the reward function '<lambda>' returned 1 rewards, not 2"),
        ([second, second], {}, r"prompts\[3\], sample 1: the reward is None, not a finite number. None means that"),
        ([in_order, in_order], {"answer": 1, "gold": 2}, r"takes the column 'gold' \(asked: in_order, in_order_2\)"),
    ],
)
def test_what_goes_wrong_names_the_function(reward_fn, columns, message):
    with pytest.raises(RewardError, match=message):
        rewards_of(reward_fn, columns)


def by_answer(prompts, completions, answer):
    raise AssertionError("called without its column")


def of_another_trainer(solution_str, ground_truth, extra_info):
    raise AssertionError("called without its columns")


@pytest.mark.parametrize(
    "reward_fn,columns,message",
    [
        (by_answer, {}, r"'by_answer' needs 'answer', which is no column.*the columns: none. Give it as columns="),
        (by_answer, {"answers": 1}, r"No reward function takes the column 'answers' \(asked: by_answer\)"),
        ([by_answer, everything], {"answers": 1}, r"needs 'answer'.*the columns: answers. Did you mean 'answers'\?"),
        (of_another_trainer, {}, r"needs 'solution_str', which is no column. Arguments are passed by name: prompts, "),
        (lambda completion, answer: [0, 0], {"answer": 1}, r"needs 'completion'.*Did you mean 'completions'\?"),
        (lambda a, b, c, d, /: [0, 0], {}, r"needs 'd', which is no column"),
        (lambda completions, trainer_state: [0, 0], {}, r"needs 'trainer_state', which is no column"),
    ],
)
def test_a_parameter_without_a_column_is_refused_and_never_gets_another_list(reward_fn, columns, message):
    with pytest.raises(RewardError, match=message):
        rewards_of(reward_fn, columns)


@pytest.mark.parametrize(
    "reward_fn,weights,message",
    [
        (lambda *_: [1.0, 1e39], None, r"prompts\[3\], sample 1: the reward is 1e\+39, which is not finite in float32"),
        (lambda *_: [0.0, -(10**400)], None, r"prompts\[3\], sample 1: the reward is -1\d+, which is not finite in "),
        ([lambda *_: [3e38, 0], lambda *_: [3e38, 0]], None, r"sample 0: the weighted sum of the rewards is 6e\+38, w"),
        ([lambda *_: [0, 3e38]], [2.0], r"sample 1: the weighted sum of the rewards is 6e\+38, which is not finite"),
    ],
)
def test_a_reward_beyond_float32_is_refused(reward_fn, weights, message):
    with pytest.raises(RewardError, match=message):
        rewards_of(reward_fn, weights=weights)


def test_the_largest_float32_is_a_reward():
    assert rewards_of(lambda *_: [LARGEST_REWARD, -LARGEST_REWARD]).total == [LARGEST_REWARD, -LARGEST_REWARD]


@pytest.mark.parametrize(
    "reward_fn,weights,message",
    [
        ([], None, r"reward_fn=\[\] is not allowed: must be a function or a list of at least one"),
        ([first, "exact_match"], None, r"reward_fn\[1\]='exact_match' is not allowed: must be a function"),
        ("exact_match", None, "reward_fn='exact_match' is not allowed: must be a function"),
        (3, None, "reward_fn=3 is not allowed: must be a function"),
        (
            [first, second],
            [1.0],
            r"reward_weights=\[1.0\] is not allowed: must be a list of 2, one per reward function",
        ),
        ([first], [float("nan")], r"reward_weights\[0\]=nan is not allowed: must be a finite number"),
        (first, ["1"], r"reward_weights\[0\]='1' is not allowed"),
    ],
)
def test_what_is_no_function_and_no_weight_is_refused_at_once(reward_fn, weights, message):
    with pytest.raises(RequestError, match=message):
        RewardCaller(reward_fn, weights=weights)
