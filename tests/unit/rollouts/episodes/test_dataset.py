"""Data sets with reward functions as environments, stepped by hand and in rollouts."""

import asyncio
import json

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError, RewardError
from tests.unit.rollouts.episodes.playing import play

ROWS = [{"prompt": f"{number} + 1?", "answer": str(number + 1), "level": number} for number in range(5)]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def is_right(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def by_place(prompts, completions, completion_ids):
    return [len(prompts[0]) * 100 + len(completions[0]) * 10 + len(completion_ids[0])]


def only_easy(level, completion_ids):
    return [float(len(completion_ids[0])) if level[0] < 2 else None]


async def later(completions, answer):
    await asyncio.sleep(0)
    return [len(completions[0]) + len(answer[0])]


def reward(spec, text, seed=2, token_ids=(7, 8)):
    env = spec()
    env.reset(seed)
    observation = env.step(Action(text, list(token_ids)))
    if asyncio.iscoroutine(observation):
        observation = asyncio.run(observation)
    assert observation.terminated and not observation.truncated
    return observation


@pytest.mark.parametrize("kind", ["dicts", "columns", "file"])
def test_rows_come_from_dicts_columns_or_a_file(kind, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    options = {"dicts": {"rows": ROWS}, "columns": {"rows": columns}, "file": {}}[kind]
    spec = make_env(f"dataset:{path}" if kind == "file" else "dataset", reward_fn=is_right, **options)
    assert spec.is_single_turn
    began = spec().reset(13)
    assert (began.messages, began.info) == ("3 + 1?", {"row": 3})
    assert reward(spec, "3").reward == 1.0
    assert reward(spec, "4").reward == 0.0


def test_functions_are_called_as_by_rollouts_of_prompts():
    assert reward(make_env("dataset", rows=ROWS, reward_fn=by_place), "abc").reward == 632
    spec = make_env("dataset", rows=CHATS, reward_fn=lambda completions, **_: [completions[0][0]["content"] == "x"])
    assert reward(spec, "x").reward == 1.0
    by_question = [{"question": "?", "prompt": 1}]
    spec = make_env("dataset", rows=by_question, prompt_column="question", reward_fn=lambda prompts, prompt: prompt)
    assert reward(spec, "x").reward == 1.0


def test_several_functions_are_weighed_where_they_apply():
    functions = [is_right, only_easy, later]
    spec = make_env("dataset", rows=ROWS, reward_fn=functions, reward_weights=[10, 1, 0.5])
    ended = reward(spec, "2", seed=1)
    assert ended.reward == 10 + 2 + 1
    assert ended.info == {"row": 1, "rewards": {"is_right": 1.0, "only_easy": 2.0, "later": 2.0}}
    assert reward(spec, "3").info["rewards"]["only_easy"] is None


def test_a_function_may_change_what_it_gets():
    def greedy(prompts, completions, answer):
        prompts[0].clear()
        answer[0].append("more")
        return [len(answer[0])]

    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": ["one"]}]
    spec = make_env("dataset", rows=rows, reward_fn=[greedy, greedy])
    assert [reward(spec, "x").reward for _ in range(2)] == [4.0, 4.0]
    assert rows == [{"prompt": [{"role": "user", "content": "?"}], "answer": ["one"]}]


@pytest.mark.parametrize(
    "value, message",
    [
        ([1.0, 2.0], "row 2: 'f' returned 2 rewards, not 1"),
        (1.0, "returned float, not a list"),
        ([float("nan")], "the reward is nan"),
        ([None], "at least one must"),
    ],
)
def test_a_wrong_reward_ends_the_episode_with_the_reason(value, message):
    def f(completions):
        return value

    with pytest.raises(RewardError, match=message):
        reward(make_env("dataset", rows=ROWS, reward_fn=f), "x")


def test_a_rollout_of_as_many_episodes_as_rows_plays_each_once(policy):
    env = make_env("dataset", rows=ROWS, reward_fn=only_ids)
    batch = play(policy, env, num_episodes=5, num_samples=2)
    rows = [info["row"] for info in batch["info"]]
    assert sorted(rows[::2]) == [0, 1, 2, 3, 4] and rows[::2] == rows[1::2]
    assert batch["error"] == [None] * 10
    lengths = batch["masks", "all_assistant_mask"].sum(-1)
    assert batch["next", "reward"][:, 0].tolist() == lengths.tolist()
    assert batch["next", "terminated"].all() and not batch["next", "truncated"].any()
    assert batch["truncated"][:, 0].tolist() == [reason == "length" for reason in batch["finish_reason"]]


def only_ids(completion_ids):
    return [len(ids) for ids in completion_ids]


def test_reward_functions_are_imported_by_worker_processes(policy):
    env = make_env("dataset", rows=ROWS, reward_fn=f"{__name__}:only_ids", placement="processes", num_workers=1)
    batch = play(policy, env, num_episodes=2)
    assert batch["next", "reward"][:, 0].tolist() == batch["masks", "all_assistant_mask"].sum(-1).tolist()


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("dataset", {"rows": ROWS}, "needs the option reward_fn"),
        ("dataset", {"reward_fn": is_right}, "either their path"),
        ("dataset:x.jsonl", {"rows": ROWS, "reward_fn": is_right}, "either their path"),
        ("dataset:/nowhere.jsonl", {"reward_fn": is_right}, "No such file"),
        ("dataset", {"rows": [], "reward_fn": is_right}, "at least one dict"),
        ("dataset", {"rows": {"prompt": ["a"], "answer": []}, "reward_fn": is_right}, "the same number of values"),
        ("dataset", {"rows": {"prompt": "a"}, "reward_fn": is_right}, "a list of values, one a row"),
        ("dataset", {"rows": [{"prompt": 3, "answer": "x"}], "reward_fn": is_right}, "a text or a list of messages"),
        ("dataset", {"rows": ROWS, "prompt_column": "question", "reward_fn": is_right}, "'question' is missing"),
        ("dataset", {"rows": ROWS, "reward_fn": lambda completions, anwser: [0]}, "'anwser', which is no column"),
        ("dataset", {"rows": ROWS, "reward_fn": "nowhere:f"}, "No module named 'nowhere'"),
        ("dataset", {"rows": ROWS, "reward_fn": [is_right, 3]}, r"reward_fn\[1\]=3"),
        ("dataset", {"rows": ROWS, "reward_fn": is_right, "reward_weights": [1, 2]}, "a list of 1"),
        ("dataset", {"rows": ROWS, "reward": is_right}, "Did you mean 'reward_fn'"),
        ("dataset", {"rows": [{"prompt": "?", "prompts": 1}], "reward_fn": by_place}, "Rename it"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(name, **options)
