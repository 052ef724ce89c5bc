"""Environments of the real TorchRL, stepped by hand beside."""

import threading

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.episodes.env_calls import EnvCalls

pytest.importorskip("torchrl")

import torch  # noqa: E402
from tensordict import TensorDict, list_to_stack, set_list_to_stack  # noqa: E402
from torchrl.data.llm import History  # noqa: E402

from tests.envs import torchrl_worlds  # noqa: E402

WORLDS = "torchrl:tests.envs.torchrl_worlds"
ANSWERS = ["hello there", "one", "one two three"]


@pytest.fixture(autouse=True)
def same_generator():
    """Leaves torch's generator as it was; environments stepped here draw from it."""
    with torch.random.fork_rng(devices=[]):
        yield


def test_chats_and_their_rewards_are_those_of_the_environment_stepped_by_hand():
    rows = [{"query": f"question {number}"} for number in range(4)]
    spec = make_env(f"{WORLDS}:remarks", rows=rows, max_steps=3)
    assert spec.placement == "processes"
    was = list_to_stack()
    env = spec()
    told = [env.reset(6), *(env.step(Action(answer)) for answer in ANSWERS)]
    env.close()
    assert list_to_stack() == was
    with set_list_to_stack(True):
        by_hand = torchrl_worlds.remarks()
        state = by_hand.reset(TensorDict({"query": ["question 2"]}, [1]))
        said = list(state["history"].prompt[0].content)
        assert [message["content"] for message in told[0].messages] == said == ["Be brief.", "question 2"]
        for answer, observation in zip(ANSWERS, told[1:], strict=True):
            history = state["history"]
            history.response = History(role="assistant", content=answer, batch_size=()).unsqueeze(0).unsqueeze(0)
            history.full = history.prompt.extend(history.response, inplace=False, dim=-1)
            state["history"] = history
            after = by_hand.step(state)["next"]
            assert observation.reward == after["reward"].item() == len(answer.split())
            assert (observation.terminated, observation.truncated) == (False, after["truncated"].item())
            if not observation.truncated:
                said = list(after["history"].prompt[0].content)
                assert [message["content"] for message in observation.messages] == said[-1:]
                state = by_hand.step_mdp(state)
    assert told[3].truncated


@pytest.mark.parametrize("batch_size", [[], [1]])
def test_texts_and_their_rewards_are_those_of_the_environment_stepped_by_hand(batch_size):
    env = make_env(f"{WORLDS}:Guess", batch_size=batch_size)()
    torch.manual_seed(5)
    assert env.reset(5).messages == "A number from 10 to 99?"
    torch.manual_seed(5)
    by_hand = torchrl_worlds.Guess()
    state = by_hand.reset()
    for guess in (10, 99, by_hand.number):
        state["action"] = str(guess)
        after, observation = by_hand.step(state)["next"], env.step(Action(str(guess)))
        assert (observation.reward, observation.terminated) == (after["reward"].item(), after["done"].item())
        assert observation.messages == (() if observation.terminated else after["observation"])
        state = by_hand.step_mdp(state)
    assert observation.terminated and observation.reward == 0.0


def test_a_factory_gets_the_seed_of_the_episode():
    spec = make_env(f"{WORLDS}:of_questions")
    questions = [spec().reset(seed).messages[0]["content"] for seed in (1, 2, 1, 3)]
    assert questions[0] == questions[2] and len(set(questions)) > 1
    fixed = make_env(f"{WORLDS}:of_questions", seed=2)
    assert [fixed().reset(seed).messages[0]["content"] for seed in (1, 2)] == [questions[1]] * 2


def test_worker_processes_play_with_the_episodes_own_generator():
    came = threading.Event()
    running = EnvCalls(make_env(f"{WORLDS}:Guess", num_workers=1), came.set)
    rewards, begun = {}, set()
    try:
        for key, seed in enumerate((5, 6, 5)):
            running.reset(key, seed)
        while len(rewards) < 3:
            assert came.wait(240)
            came.clear()
            for key, result in running.take():
                if key in begun:
                    rewards[key] = result.reward[0]
                    running.close(key)
                else:
                    begun.add(key)
                    running.step(key, Action("10"))
    finally:
        running.end()
    numbers = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        numbers.append(int(torch.randint(10, 100, ())))
    expected = torch.tensor([10 - number for number in numbers]) / 100
    assert torch.allclose(torch.tensor([rewards[key] for key in range(3)]), expected)
    assert rewards[0] == rewards[2] != rewards[1]


@pytest.mark.parametrize(
    "factory, message",
    [
        ("nothing", "a torchrl EnvBase"),
        ("as_text", "the observation must be a chat"),
        ("too_many", r"one episode at a time"),
    ],
)
def test_an_environment_of_another_kind_is_refused(factory, message):
    rows = [{"query": "?"}]
    with pytest.raises(ValueError, match=message):
        make_env(f"{WORLDS}:{factory}", rows=rows)().reset(0)


def test_a_chat_that_forgets_is_refused():
    env = make_env(f"{WORLDS}:forgets", rows=[{"query": "?"}])()
    env.reset(0)
    with pytest.raises(ValueError, match="rewrote the conversation"):
        env.step(Action("hello"))


def test_threads_are_refused():
    problems = []

    def begin():
        try:
            make_env(f"{WORLDS}:Guess", placement="threads")()
        except ConfigError as problem:
            problems.append(str(problem))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert problems == [f'{WORLDS}:Guess runs in worker processes: placement="processes".']


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("torchrl:nowhere:make", {}, "No module named 'nowhere'"),
        (f"{WORLDS}:missing", {}, "has no attribute 'missing'"),
        (f"{WORLDS}:remarks", {"steps": 3}, "does not take the options: got an unexpected keyword argument 'steps'"),
        (f"{WORLDS}:remarks", {"rows": []}, "at least one dict"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(name, **options)
