"""Data sets that the real package `datasets` has written."""

import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError

pytest.importorskip("datasets")

import datasets  # noqa: E402

ROWS = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1)} for n in range(5)]


def is_right(completions, answer):
    return [float(said[0]["content"] == right) for said, right in zip(completions, answer, strict=True)]


@pytest.fixture
def data():
    return datasets.Dataset.from_list(ROWS)


def play(spec):
    env = spec()
    began = env.reset(7)
    return began.messages, [env.step(Action(text)).reward for text in ("3", "4")]


def test_a_data_set_in_memory_or_saved_is_played_row_by_row(data, tmp_path):
    data.save_to_disk(tmp_path / "saved")
    expected = (ROWS[2]["prompt"], [1.0, 0.0])
    assert play(make_env("dataset", rows=data, reward_fn=is_right)) == expected
    assert play(make_env(f"dataset:{tmp_path / 'saved'}", reward_fn=is_right)) == expected
    assert play(make_env("dataset", rows=tmp_path / "saved", reward_fn=is_right)) == expected


def test_a_split_is_named_by_its_directory(data, tmp_path):
    datasets.DatasetDict(train=data, test=data.select([2])).save_to_disk(tmp_path)
    with pytest.raises(ConfigError, match="holds several splits. Name one of them: .*/train, .*/test"):
        make_env(f"dataset:{tmp_path}", reward_fn=is_right)
    assert play(make_env(f"dataset:{tmp_path}/test", reward_fn=is_right))[1] == [1.0, 0.0]


def test_other_directories_and_columns_are_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="what Dataset.save_to_disk wrote"):
        make_env(f"dataset:{tmp_path}", reward_fn=is_right)
    with pytest.raises(ConfigError, match="the field 'question' is missing; there are 'prompt', 'answer'"):
        make_env("dataset", rows=data, reward_fn=is_right, prompt_column="question")
    with pytest.raises(ConfigError, match="empty"):
        make_env("dataset", rows=data.select([]), reward_fn=is_right)
