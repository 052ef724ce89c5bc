"""Games of the real textarena, played by hand and by policies."""

import random
import re

import numpy as np
import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint

pytest.importorskip("textarena")

import textarena  # noqa: E402
from textarena.envs.registration import ENV_REGISTRY  # noqa: E402

FEW = {"GuessTheNumber-v0": 1, "KuhnPoker-v0": 2, "PigDice-v0": 2, "TicTacToe-v0": 2}
NEVER_RETURN = {"PublicGoodsGame-v0"}
RAISE = {"CharacterConclave-v0"}
GIVE_REASONS_FOR_REWARDS = {"Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"}
WORDS = ("[{}]", "{}", "[{} {}]", "[check]", "[call]", "[bet]", "[roll]", "[hold]", "no idea", "[rock]", "[accept]")


@pytest.fixture
def as_before():
    """The global random generators are as they were when the test began."""
    python, of_numpy = random.getstate(), str(np.random.get_state())
    yield
    assert random.getstate() == python
    assert str(np.random.get_state()) == of_numpy


class ByHand:
    """A game of textarena's own, in generators seeded as those of an episode."""

    def __init__(self, name, num_players, seed):
        self.before, self.is_over = {}, False
        random.seed(seed)
        np.random.seed(seed)
        self.env = textarena.make(name)
        self.env.reset(num_players=num_players, seed=seed)

    def read(self):
        """(player, what it has not read): the wrapper gives everything from the beginning."""
        seat, text = self.env.get_observation()
        new = text.removeprefix(self.before.get(seat, ""))
        self.before[seat] = text
        return seat, new

    def step(self, answer):
        done, _ = self.env.step(action=answer)
        return self.env.close()[0] if done else None


def answers(seed, count):
    choice = random.Random(seed)
    return [choice.choice(WORDS).format(choice.randrange(9), choice.randrange(9)) for _ in range(count)]


def without_own_answer(text, seat, said):
    """What a player reads by textarena, less the answer that it gave itself."""
    bracketed = said if "[" in said or "]" in said else f"[{said}]"
    return re.sub(rf"\n\[Player( {seat})?\] {re.escape(bracketed)}", "", text, count=1)


@pytest.mark.parametrize("name, num_players", FEW.items())
def test_a_game_is_the_one_played_by_hand(name, num_players, as_before):
    spec = make_env(f"textarena:{name}")
    assert (spec.placement, spec().num_seats) == ("processes", num_players)
    kept = random.getstate(), np.random.get_state()
    num_ends = 0
    for seed in range(8):
        by_hand, said, expected = ByHand(name, num_players, seed), {}, []
        expected.append(by_hand.read())
        for answer in answers(seed, 30):
            rewards = by_hand.step(answer)
            seat = expected[-1][0]
            said[seat] = answer
            if rewards is not None:
                break
            seat, text = by_hand.read()
            expected.append((seat, without_own_answer(text, seat, said[seat]) if seat in said else text))
        env = spec()
        observation = env.reset(seed)
        for answer, (seat, text) in zip(answers(seed, 30), expected, strict=False):
            assert observation.seat == seat
            assert observation.messages == text.strip("\n")
            assert (observation.reward, observation.terminated) == ({}, False)
            observation = env.step(Action(answer, seat=seat))
        if rewards is not None:
            num_ends += 1
            assert (observation.terminated, observation.truncated, observation.reward) == (True, False, rewards)
            assert observation.info["game"].keys() == set(range(num_players))
    assert num_ends
    random.setstate(kept[0])
    np.random.set_state(kept[1])


def test_episodes_of_one_seed_are_the_same_though_others_draw_in_between(as_before):
    spec = make_env("textarena:PigDice-v0")
    one, other, stranger = spec(), spec(), spec()
    assert one.reset(7).messages == other.reset(7).messages
    stranger.reset(8)
    seen = []
    for _ in range(12):
        first = one.step(Action("[roll]"))
        stranger.step(Action("[hold]"))
        second = other.step(Action("[roll]"))
        assert (first.messages, first.seat, first.reward) == (second.messages, second.seat, second.reward)
        seen.append(first.messages)
        if first.terminated:
            break
    assert len(set(seen)) > 1


def test_a_seed_determines_what_is_hidden(as_before):
    spec, numbers = make_env("textarena:GuessTheNumber-v0", max_number=500), []
    for seed in (1, 1, 2, 3):
        env = spec()
        env.reset(seed)
        numbers.append(env._game.game_number)
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


def test_players_read_what_is_new_and_a_refused_answer_is_told():
    env = make_env("textarena:TicTacToe-v0")()
    first = env.reset(0)
    assert first.seat == 0
    assert first.messages.startswith("[GAME] You are Player 0 in Tic Tac Toe.")
    second = env.step(Action("I take [4]", seat=0))
    assert second.seat == 1
    assert second.messages.startswith("[GAME] You are Player 1 in Tic Tac Toe.")
    assert "[Player 0] I take [4]" in second.messages
    third = env.step(Action("4", seat=1))  # taken: the wrapper adds brackets
    assert third.seat == 1
    assert third.messages.startswith("[GAME] Player 1 attempted an invalid move. Reason:")
    fourth = env.step(Action("[0]", seat=1))
    assert fourth.seat == 0
    assert "You are Player" not in fourth.messages and "I take" not in fourth.messages
    assert "[Player 1] [0]" in fourth.messages
    env.step(Action("[2]", seat=0))
    env.step(Action("[1]", seat=1))
    last = env.step(Action("[6]", seat=0))
    assert (last.terminated, last.reward) == (True, {0: 1.0, 1: -1.0})
    assert last.info["game"][0]["reason"] == "Player 0 has won!"


def test_a_name_that_ends_in_train_hides_the_words_of_others():
    env = make_env("textarena:TicTacToe-v0-train")()
    assert env.reset(0).messages.startswith("You are Player 0")
    second = env.step(Action("Ha! [4]", seat=0)).messages
    assert "Ha!" not in second
    assert "placed their symbol (O) in cell 4." in second


def test_a_name_that_ends_in_raw_takes_answers_as_they_are():
    env = make_env("textarena:TicTacToe-v0-raw")()
    env.reset(0)
    refused = env.step(Action("4", seat=0))
    assert (refused.seat, "does not follow the correct format" in refused.messages) == (0, True)
    assert env.step(Action("[4]", seat=0)).seat == 1


def test_the_number_of_players_is_chosen_where_a_game_leaves_it_open():
    assert make_env("textarena:LiarsDice-v0")().num_seats == 2
    assert make_env("textarena:LiarsDice-v0", num_players=4)().num_seats == 4
    assert make_env("textarena:ThreePlayerTicTacToe-v0")().num_seats == 3


def test_rewards_that_are_no_numbers_are_an_error():
    env = make_env("textarena:ThreeCardMonte-v0")()
    env.reset(0)
    with pytest.raises(ValueError, match="ThreeCardMonte-v0 has ended with .* for rewards, which are no numbers"):
        for _ in range(9):
            env.step(Action("no idea"))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("TicTacTo-v0", {}, "Did you mean 'TicTacToe-v0'"),
        ("TicTacToe-v0", {"board": 4}, "does not start with {'board': 4}: TypeError"),
        ("TicTacToe-v0", {"num_players": 3}, "number of players has to be 2, received 3"),
        ("TicTacToe-v0", {"num_players": 0}, "num_players=0 is not allowed: must be an int from 1 to 15"),
        ("GuessWho-v0", {}, "does not start with {}: ValueError: OpenRouter API key not found"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        make_env(f"textarena:{name}", **options)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    options = {"dtype": "float32", "num_kv_blocks": 4096, "max_model_len": 2048, "num_threads": 1}
    with RolloutPolicy.from_pretrained(checkpoint, **options) as made:
        yield made


def rollout(policy, env, **options):
    return policy.rollout(None, SamplingParams(max_tokens=4), env=env, seed=1, use_tqdm=False, **options)


def test_a_policy_plays_both_seats(policy, as_before):
    spec = make_env("textarena:KuhnPoker-v0", num_workers=2)
    batch = rollout(policy, spec, num_episodes=3, num_samples=2)
    assert list(batch["ended_by"]) == ["terminated"] * len(batch)
    returns = {}
    for episode, seat, reward in zip(batch["episode_id"], batch["seat"], batch["next", "reward"], strict=True):
        returns[episode.item(), seat.item()] = reward.item()
    for episode in range(6):
        played = [reward for (each, _), reward in returns.items() if each == episode]
        assert played in ([-1.0], [-1.0, 1.0], [1.0, -1.0])  # nonsense loses
    starts = {}
    for group, messages in zip(batch["group_id"], batch["messages"], strict=True):
        starts.setdefault(group.item(), set()).add(messages[0]["content"])
    assert all(len(texts) == 1 for texts in starts.values())


def test_a_function_plays_the_other_seat_and_wins(policy):
    batch = rollout(policy, make_env("textarena:TicTacToe-v0", num_workers=1), num_episodes=2, seats={1: lowest_cell})
    assert batch["seat"].tolist() == [0, 0]
    assert batch["next", "reward"].flatten().tolist() == [-1.0, -1.0]
    assert batch["num_turns"].tolist() == [2, 2]  # two refused answers


def lowest_cell(messages):
    return re.findall(r"\[\d\]", messages[-1]["content"])[0]


def families():
    plain = sorted(name for name in ENV_REGISTRY if re.search(r"-v\d+$", name))
    return [name + ending for name in plain if name not in {*FEW, *NEVER_RETURN} for ending in ("", "-train")]


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_every_game_that_starts_gives_the_rewards_of_textarena(name, as_before):
    kept = random.getstate(), np.random.get_state()
    try:
        spec = make_env(f"textarena:{name}")
    except ConfigError as problem:
        pytest.skip(str(problem)[:200])
    for seed in range(3):
        env = spec()
        env.reset(seed)
        by_hand = ByHand(name, env.num_seats, seed)
        for answer in answers(seed, 40):
            seat, problem = by_hand.env.state.current_player_id, None
            try:
                rewards = by_hand.step(answer)
            except Exception as raised:
                problem = raised
            by_hand_state = random.getstate(), np.random.get_state()
            if problem is not None:
                assert name.removesuffix("-train") in RAISE
                with pytest.raises(type(problem)):
                    env.step(Action(answer, seat=seat))
                break
            if rewards is not None and any(isinstance(reward, str) for reward in rewards.values()):
                assert name.removesuffix("-train") in GIVE_REASONS_FOR_REWARDS
                with pytest.raises(ValueError, match="no numbers"):
                    env.step(Action(answer, seat=seat))
                break
            observation = env.step(Action(answer, seat=seat))
            assert observation.messages or observation.terminated
            random.setstate(by_hand_state[0])
            np.random.set_state(by_hand_state[1])
            assert observation.reward == (rewards or {})
            assert observation.terminated == (rewards is not None)
            if observation.terminated:
                break
    random.setstate(kept[0])
    np.random.set_state(kept[1])
