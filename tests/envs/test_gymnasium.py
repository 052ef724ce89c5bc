"""Environments of the real gymnasium, stepped by hand and played by a policy."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from envs_adapters import Action, make_env
from envs_adapters.gymnasium_text import ActionReader, mark_colours, text_of
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.episodes.observations import as_observation
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint

pytest.importorskip("gymnasium")

import gymnasium  # noqa: E402
from gymnasium import spaces  # noqa: E402

WAYS = ["left", "down", "right", "up"]
LAKE = ["[S]FFF", "FHFH", "FFFH", "HFFG"]
SAFE_WAY = ["down", "down", "right", "right", "down", "right"]


class Parrot(gymnasium.Env):
    """Text in, text out."""

    observation_space = action_space = spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Say {self.np_random.integers(10)}{(options or {}).get('end', '.')}", {"began": True}

    def step(self, action):
        return f"You said: {action}", 0.25, action == "end", False, {}


class Dial(gymnasium.Env):
    """Actions from -1 to 1, and a pair of numbers."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, space=None):
        self.action_space = space or spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        return np.array([0.123456, 0], np.float32), {}

    def step(self, action):
        return np.array([action, 0.5], np.float32), np.float64(action), np.bool_(False), np.bool_(False), {}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Parrot-v0", Parrot)
    gymnasium.register("Dial-v0", Dial)


@pytest.fixture
def as_before():
    """The global random generators are as they were when the test began."""
    python, of_numpy = random.getstate(), str(np.random.get_state())
    yield
    assert random.getstate() == python
    assert str(np.random.get_state()) == of_numpy


def test_a_lake_is_crossed_by_names_of_actions():
    env = make_env("gymnasium:FrozenLake-v1", actions=WAYS, is_slippery=False)()
    first = env.reset(seed=3)
    assert first.messages == "\n".join([*LAKE, "", "Answer with an action: left, down, right or up."])
    observations = [env.step(Action(f"I go {way.upper()}.\n")) for way in SAFE_WAY]
    assert observations[0].messages == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [each.reward for each in observations] == [0, 0, 0, 0, 0, 1]
    assert [each.terminated for each in observations] == [False] * 5 + [True]
    assert not any(each.truncated for each in observations)
    assert observations[0].info == {"prob": 1.0}
    env.close()


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1"])
def test_rewards_and_ends_are_those_of_the_environment_stepped_by_hand(name, as_before):
    made, by_hand = make_env(f"gymnasium:{name}"), gymnasium.make(name)
    for seed in range(5):
        env, choice = made(), random.Random(seed)
        began, again = env.reset(seed), made().reset(seed)
        assert (began.messages, str(began.info)) == (again.messages, str(again.info))
        by_hand.reset(seed=seed)
        for _ in range(300):
            action = choice.randrange(by_hand.action_space.n)
            _, reward, terminated, truncated, info = by_hand.step(action)
            observation = env.step(Action(str(action)))
            assert (observation.reward, observation.terminated, observation.truncated) == (
                reward,
                terminated,
                truncated,
            )
            assert str(observation.info) == str(info)
            if terminated or truncated:
                break


@pytest.mark.parametrize("name, count", [("FrozenLake-v1", 16), ("Taxi-v4", 500), ("CliffWalking-v1", 48)])
def test_what_is_printed_tells_all_states_apart(name, count):
    env = make_env(f"gymnasium:{name}")()
    env.reset(0)
    inner, texts = env._env.unwrapped, set()
    for inner.s in range(count):
        texts.add(env._text(None))
    assert len(texts) == count
    assert not any("\x1b" in text for text in texts)


def test_observations_that_are_not_printed_are_text():
    assert (
        make_env("gymnasium:Blackjack-v1")().reset(1).messages.startswith("(20, 7, 0)\n\nAnswer with an action: 0 or")
    )
    env = make_env("gymnasium:Dial-v0")()
    assert env.reset(0).messages == "[0.1235, 0.0]\n\nAnswer with an action: -1, 0 or 1."
    observation = env.step(Action("-1"))
    assert (observation.messages, observation.reward, observation.terminated) == ("[-1.0, 0.5]", -1.0, False)
    assert make_env("gymnasium:FrozenLake-v1", render_mode=None)().reset(0).messages.startswith("0\n\n")
    words = make_env("gymnasium:FrozenLake-v1", observation_to_text=lambda cell: f"Cell {cell}", instructions="Go.")()
    assert words.reset(0).messages == "Go.\n\nCell 0\n\nAnswer with an action: 0, 1, 2 or 3."


def test_texts_are_actions_of_text_environments():
    env = make_env("gymnasium:Parrot-v0", reset_options={"end": "!"})()
    first = env.reset(4)
    by_hand = gymnasium.make("Parrot-v0", disable_env_checker=True)
    assert (first.messages, first.info) == by_hand.reset(seed=4, options={"end": "!"})
    assert first.messages.endswith("!")
    observation = env.step(Action(" two words: ä "))
    assert (observation.messages, observation.reward) == ("You said:  two words: ä ", 0.25)
    assert env.step(Action("end")).terminated


def test_an_answer_that_is_no_action_is_told_and_costs_a_step():
    env = make_env("gymnasium:FrozenLake-v1", actions=WAYS, is_slippery=False, max_episode_steps=3)()
    env.reset(0)
    assert env.step(Action("down")).messages == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    refused = env.step(Action("west"))
    assert refused.messages == "That is no action. Answer with an action: left, down, right or up."
    assert (refused.reward, refused.terminated, refused.truncated) == (-1.0, False, False)
    assert refused.info == {"is_invalid": True}
    last = env.step(Action("down"))
    assert last.messages == "  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG"
    assert (last.terminated, last.truncated) == (False, True)
    env = make_env("gymnasium:FrozenLake-v1", invalid_reward=-0.5, max_episode_steps=1)()
    env.reset(0)
    only = env.step(Action(""))
    assert (only.reward, only.terminated, only.truncated) == (-0.5, False, True)


def test_a_limit_of_steps_truncates_and_an_end_terminates():
    env = make_env("gymnasium:CliffWalking-v1", max_episode_steps=2)()
    env.reset(0)
    assert not env.step(Action("0")).truncated
    last = env.step(Action("0"))
    assert (last.terminated, last.truncated) == (False, True)
    env = make_env("gymnasium:FrozenLake-v1", is_slippery=False, max_episode_steps=3)()
    env.reset(0)
    env.step(Action("1"))
    env.step(Action("what?"))
    end = env.step(Action("2"))  # a hole, at the last step
    assert (end.terminated, end.truncated) == (True, False)


def test_actions_of_other_spaces_are_made_by_a_function():
    options = {"space": spaces.Box(-1, 1, ())}
    with pytest.raises(ConfigError, match="neither discrete nor texts, but Box.*action_from_text"):
        make_env("gymnasium:Dial-v0", **options)
    env = make_env("gymnasium:Dial-v0", action_from_text="builtins:float", **options)()
    assert env.reset(0).messages == "[0.1235, 0.0]"
    assert env.step(Action("0.75")).reward == 0.75
    refused = env.step(Action("three"))
    assert (refused.messages, refused.reward) == ("That is no action.", -1.0)


@pytest.mark.parametrize(
    "text, action",
    [
        ("up", 4),
        ("  **Up**!\n", 4),
        ("First down, then pick up", 5),
        ("2", 2),
        ("Action: 1.", 1),
        ("left\n3", 3),
        ("", None),
        ("upper", None),
        ("go up and away", None),
        ("0", None),
        ("6", None),
        ("-1", None),
        ("1.5", None),
        ("x2", None),
        ("1" * 5000, None),
        ("٣", 3),
        ("²", None),
    ],
)
def test_an_action_is_read_where_it_ends_the_answer(text, action):
    assert ActionReader(1, 5, ["left", "Down", "right", "up", "pick up"]).read(text) == action


@pytest.mark.parametrize(
    "printed, text",
    [
        ("\n\x1b[41mS\x1b[0mF\nFF\n", "[S]F\nFF"),
        ("|\x1b[35m\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m\x1b[0m:|", "|<*[R]*>:|"),
        ("\x1b[38;5;43mx\x1b[m \x1b[48;2;1;2;3my\x1b[0m", "<x> [y]"),
        ("\x1b[4mplain", "plain"),
    ],
)
def test_colours_become_marks(printed, text):
    assert mark_colours(printed) == text


def test_observations_are_written_short():
    assert text_of((np.int64(3), np.float32(0.1), 1 / 3)) == "(3, 0.1, 0.3333)"
    assert text_of({"a": np.array([[1, 2], [3, 4]]), "b": "x"}) == "{'a': [[1, 2], [3, 4]], 'b': 'x'}"


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("FrozenLak-v1", {}, "FrozenLake"),
        ("Taxi-v0", {}, "Taxi-v4"),
        ("nowhere:World-v0", {}, "No module named 'nowhere'"),
        ("FrozenLake-v1", {"is_sliperry": False}, "refuses.*is_sliperry"),
        ("FrozenLake-v1", {"actions": ["left", "right"]}, "a list of 4 different names"),
        ("FrozenLake-v1", {"actions": ["a", "A", "b", "c"]}, "a list of 4 different names"),
        ("FrozenLake-v1", {"actions": ["1", "2", "3", "4"]}, "that are no numbers"),
        ("FrozenLake-v1", {"actions": "abcd"}, "a list of 4"),
        ("FrozenLake-v1", {"actions": WAYS, "action_from_text": "builtins:int"}, "absent where action_from_text"),
        ("FrozenLake-v1", {"action_from_text": "builtins:intt"}, "has no attribute 'intt'"),
        ("FrozenLake-v1", {"action_from_text": "int"}, "'int' names no attribute of a module"),
        ("FrozenLake-v1", {"invalid_reward": float("nan")}, "a finite number"),
        ("FrozenLake-v1", {"instructions": None}, "instructions=None is not allowed"),
        ("Parrot-v0", {"actions": ["a"]}, "absent: the environment's actions are texts"),
        ("Pendulum-v1", {}, "neither discrete nor texts"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(f"gymnasium:{name}", **options)


def test_a_policy_plays_and_groups_share_their_starts(tmp_path, as_before):
    checkpoint = tiny_checkpoint(tmp_path)
    options = {"dtype": "float32", "num_kv_blocks": 4096, "max_model_len": 1024, "num_threads": 1}
    env = make_env("gymnasium:Taxi-v4", render_mode=None, action_from_text=by_length, max_episode_steps=4)
    with RolloutPolicy.from_pretrained(checkpoint, **options) as policy:
        batch = policy.rollout(
            None, SamplingParams(max_tokens=6), env=env, num_episodes=3, num_samples=2, seed=1, use_tqdm=False
        )
    assert batch["num_turns"].tolist() == [4] * 6
    assert list(batch["ended_by"]) == ["truncated"] * 6
    assert batch["next", "truncated"].all() and not batch["next", "terminated"].any()
    starts = [messages[0]["content"] for messages in batch["messages"]]
    assert starts[::2] == starts[1::2] and len(set(starts)) == 3
    by_hand = gymnasium.make("Taxi-v4")
    for row, messages in enumerate(batch["messages"]):
        by_hand.reset()
        by_hand.unwrapped.s = int(starts[row])
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        rewards = [by_hand.step(by_length(answer))[1] for answer in answers]
        assert batch["rewards", "turn"][row].tolist() == rewards


def by_length(text):
    return len(text) % 6


class Screen(gymnasium.Env):
    """Draws the step that it is in; its observation is an image too."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 255, (4, 6), np.uint8)

    def __init__(self, render_mode=None):
        self.render_mode, self.frame = render_mode, np.zeros((8, 6, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        self.frame[:] = 0
        return np.full((4, 6), 7, np.uint8), {}

    def step(self, action):
        self.frame += 1 + action
        return np.full((4, 6), 8, np.uint8), 0.0, False, False, {}

    def render(self):
        return self.frame


def test_what_it_draws_or_observes_is_a_picture():
    gymnasium.register("Screen-v0", Screen)
    env = make_env("gymnasium:Screen-v0", picture="render", instructions="Look.")()
    [message] = as_observation(env.reset(0)).messages
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]
    assert [part.get("text") for part in message["content"]] == ["Look.", None, "Answer with an action: 0 or 1."]
    frames = [as_observation(env.step(Action("1")), 1, 0).messages[0]["content"] for _ in range(2)]
    shown = [np.asarray(Image.open(io.BytesIO(part["image"]))) for [part] in frames]
    assert [frame.shape for frame in shown] == [(8, 6, 3)] * 2 and [frame.max() for frame in shown] == [2, 4]
    assert env.step(Action("?")).messages == "That is no action. Answer with an action: 0 or 1."
    env = make_env("gymnasium:Screen-v0", picture="observation", observation_to_text=lambda seen: f"{seen.max()}")()
    content = as_observation(env.reset(0)).messages[0]["content"]
    assert np.asarray(Image.open(io.BytesIO(content[0]["image"])))[0, 0].tolist() == [7, 7, 7]
    assert content[1]["text"] == "7"
    with pytest.raises(ConfigError, match="picture='screen' is not allowed: must be 'render' or 'observation'"):
        make_env("gymnasium:Screen-v0", picture="screen")
