"""Functions as episodes: on threads or awaited, with their rewards, faults and limits."""

import asyncio
import threading

import pytest

WAIT_SECONDS = 60.0


def test_a_function_gets_its_session_and_its_task_and_returns_the_reward(play, gateway):
    def agent(session, task):
        session.say(1, 2, 3)
        return task["worth"]

    episodes = play(agent, [{"worth": 1}, {"worth": 2.5}], 2)
    assert [each.reward for each in episodes] == [1.0, 1.0, 2.5, 2.5]
    assert [each.num_tokens for each in episodes] == [3] * 4 and len({each.session_id for each in episodes}) == 4


def test_a_function_may_be_async(play):
    async def agent(session, task):
        await asyncio.sleep(0.01)
        return task

    assert [each.reward for each in play(agent, range(1, 20))] == [float(task) for task in range(1, 20)]


def test_rewards_may_be_set_on_the_session(play_one):
    def agent(session, task):
        session.say(1)
        session.say(2)
        session.reward(0.25, row=0)
        session.reward(0.75, row=1)

    episode = play_one(agent)
    assert (episode.reward, episode.outcome.reward) == (0.75, None)
    assert [row.reward for row in episode.rows] == [0.25, 0.75]


def test_a_reward_function_sees_the_conversation(play_one):
    def agent(session, task):
        session.say(4, 5)

    assert play_one(agent, reward=lambda messages: len(messages[-1]["content"])).reward == len("(4, 5)")


def fails(session, task):
    session.say(1, 2)
    raise ValueError("no such row")


def test_a_function_that_raises_keeps_its_tokens(play_one):
    episode = play_one(fails)
    assert episode.outcome.error == "fails raised ValueError: no such row" and episode.num_tokens == 2
    assert isinstance(episode.outcome.cause, ValueError)


@pytest.mark.parametrize(
    "agent, said",
    [
        (lambda session, task: None, "ended without a reward: return a number"),
        (lambda session, task: "good", "returned 'good', not a number"),
        (lambda session: 1.0, "TypeError"),
    ],
)
def test_a_function_without_a_reward_fails(agent, said, play_one):
    assert said in play_one(agent).outcome.error


@pytest.mark.quick(1)
@pytest.mark.parametrize("limit", ["timeout", "episode_timeout"])
def test_a_function_whose_time_is_up_loses_its_session(limit, play, gateway):
    has_lost = threading.Event()

    def agent(session, task):
        session.say(1)
        if task == "slow":
            while not session.is_closed:
                threading.Event().wait(0.01)
            has_lost.set()
        return 1.0

    slow, quick = play(agent, ["slow", "quick"], **{limit: 0.5})
    assert quick.reward == 1.0 and slow.reward == 0.0 and slow.num_tokens == 1
    if limit == "timeout":
        assert "did not return within 0.5 seconds (Agent(timeout=...))." in slow.outcome.error
    else:
        assert (slow.outcome.ended_by, slow.outcome.error) == ("episode_timeout", None) and has_lost.wait(WAIT_SECONDS)
