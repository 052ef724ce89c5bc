"""Sweep files: what they say, and where their mistakes are."""

from pathlib import Path

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.rollouts.evaluation.sweep_file import read_sweep_file
from rollout_engine.rollouts.evaluation.tasks import prepare_tasks

EXAMPLE = Path(__file__).parents[4] / "examples" / "sweep.toml"
GOOD = """\
model = "some/model"
out = "runs/eval"
num_samples = 2

[settings.cool]
temperature = 0.5
[settings.hot]
temperature = 1.0

[[tasks]]
env = "reasoning_gym:chain_sum"

[[tasks]]
rows = "a.jsonl"
reward_fn = "rewards:right"
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text, *overrides):
        path = tmp_path / "sweep.toml"
        path.write_text(text, encoding="utf-8")
        return read_sweep_file(path, overrides)

    return read_text


def test_a_file_gives_the_arguments(read):
    found = read(GOOD)
    assert found.model == "some/model" and found.engine == {}
    assert found.arguments["sweep"] == {
        "settings": {"cool": {"temperature": 0.5}, "hot": {"temperature": 1.0}},
        "grid": {},
        "checkpoints": None,
    }
    assert found.arguments["num_samples"] == 2 and found.arguments["out"] == "runs/eval"
    assert [sorted(task) for task in found.arguments["tasks"]] == [["env"], ["reward_fn", "rows"]]


def test_overrides_go_before_the_file(read):
    found = read(GOOD, "num_samples=4", "engine.dtype=float32", 'checkpoints=["a", "b"]', "settings.cool.top_k=5")
    assert found.arguments["num_samples"] == 4 and found.engine == {"dtype": "float32"}
    assert found.arguments["sweep"]["checkpoints"] == ["a", "b"]
    assert found.arguments["sweep"]["settings"]["cool"] == {"temperature": 0.5, "top_k": 5}


def test_the_example_can_be_read():
    assert len(read_sweep_file(EXAMPLE).arguments["tasks"]) == 2


def assert_told(read, line, told):
    """`read` raises a `ConfigError` that says this, with this line of the file."""
    with pytest.raises(ConfigError) as refusal:
        read()
    assert f"sweep.toml:{line}: " in str(refusal.value) and told in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "after", "line", "told"),
    [
        ("num_samples = 2", "num_sample = 2", 3, "Unknown key 'num_sample'. Did you mean 'num_samples'?"),
        ("[settings.hot]\ntemperature", "[settings.hot]\ntemprature", 8, "key of [settings.hot] 'temprature'"),
        ("[settings.hot]", "[setings.hot]", 7, "Did you mean 'settings'?"),
        ('reward_fn = "r', 'reward_fun = "r', 15, "key of [tasks] 'reward_fun'. Did you mean 'reward_fn'?"),
        ('\nenv = "', '\nenvs = "', 11, "key of [tasks] 'envs'"),
        ("num_samples = 2", "num_samples = 2\n[engine]\ndtyp = 'float32'", 5, "key of [engine] 'dtyp'"),
    ],
)
def test_an_unknown_key_is_told_with_its_line(read, before, after, line, told):
    assert before in GOOD
    assert_told(lambda: read(GOOD.replace(before, after)), line, told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model = ", "is not TOML"),
        ('model = "m"\nout = "o"\n', r"write \[\[tasks\]\] above"),
        ('model = "m"\n[[tasks]]\nenv = "a"\n', "out=None is not allowed"),
        ('model = "m"\nsettings = 3\n', r"write \[settings\] above its keys"),
        ('tasks = ["a"]\n', "a table"),
        ("out = 'runs'\nmodel = 3\n[[tasks]]\nenv = 'a'\n", "sweep.toml:2: model=3 is not allowed"),
    ],
)
def test_other_mistakes_are_told(read, text, told):
    with pytest.raises(ConfigError, match=told):
        read(text)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read.*examples/sweep.toml"):
        read_sweep_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("num_sample=3", "^'num_sample=3': Unknown key 'num_sample'. Did you mean 'num_samples'"),
        ("engine.dtyp=x", r"^'engine.dtyp=x': Unknown key of \[engine\] 'dtyp'. Did you mean 'dtype'"),
        ("out=3", "^'out=3': out=3 is not allowed"),
    ],
)
def test_a_wrong_override_is_told_as_it_was_given(read, override, told):
    with pytest.raises(ConfigError, match=told):
        read(GOOD, override)


def test_an_override_without_a_value_is_told(read):
    with pytest.raises(ConfigError, match="write key=value"):
        read(GOOD, "num_samples")


def test_the_sweep_file_of_the_page_is_what_the_page_says(tmp_path):
    page = (EXAMPLE.parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    path = tmp_path / "sweep.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    found = read_sweep_file(path)
    assert found.model == "model"
    sweep = {"settings": {"hot": {"max_tokens": 16}}, "grid": {"temperature": [0.7, 1.0]}}
    task = {"name": "letters", "rows": "letters.jsonl", "reward_fn": "rewards:has_letter"}
    expected = {
        "sweep": sweep | {"checkpoints": None},
        "num_samples": 4,
        "k": [1, 4],
        "out": "runs/eval",
        "tasks": [task],
    }
    assert {name: found.arguments[name] for name in expected} == expected


TASKS = """\
model = "some/model"
out = "runs/eval"

[settings.cool]
max_tokens = 4
temperature = 0.5

[[tasks]]
rows = "good.jsonl"
reward_fn = "sweep_rewards:right"

[[tasks]]
name = "second"
rows = "good.jsonl"
reward_fn = "sweep_rewards:right"
"""
SECOND = TASKS[TASKS.index("name =") :]


@pytest.fixture
def task_files(tmp_path, monkeypatch):
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "cut.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    (tmp_path / "sweep_rewards.py").write_text("def right(completions):\n    return [1.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "line", "told"),
    [
        ("good.jsonl", "goood.jsonl", 14, "[[tasks]] 2: rows='goood.jsonl' is not allowed"),
        ("good.jsonl", "goood.jsonl", 14, "Paths count from the working directory, /"),
        ("good.jsonl", "cut.jsonl", 14, "[[tasks]] 2: cut.jsonl, line 2: no JSON object"),
        ("rewards:right", "rewards:rigth", 15, "[[tasks]] 2: reward_fn='sweep_rewards:rigth' is not allowed"),
        ("sweep_rewards:", "rewardz:", 15, "No module named 'rewardz'. Modules are looked for beside the sweep file"),
        ('reward_fn = "sweep_rewards:right"\n', "", 13, "[[tasks]] 2: reward_fn= is needed beside rows="),
        ('\nreward_fn = "', '\nnum_prompts = "4"\nreward_fn = "', 15, "[[tasks]] 2: num_prompts='4' is not allowed"),
    ],
)
def test_a_wrong_value_of_a_task_is_told_with_its_line(read, task_files, before, after, line, told):
    assert before in SECOND
    found = read(TASKS.replace(SECOND, SECOND.replace(before, after)))
    assert_told(found.check, line, told)


def test_tasks_that_were_checked_are_not_read_again(read, task_files, tmp_path):
    found = read(TASKS)
    found.check()
    (tmp_path / "good.jsonl").unlink()
    assert [task.name for task in prepare_tasks(found.arguments["tasks"])] == ["good", "second"]


def test_rows_that_are_beside_the_file_are_found_for_the_user(read, task_files, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"Beside the sweep file there is one: give '{tmp_path}/good.jsonl'"):
        read(TASKS).check()


def test_a_wrong_value_of_a_setting_or_the_grid_is_told_with_its_line(read, task_files):
    read(TASKS).check()
    with pytest.raises(ConfigError, match=r"sweep.toml:6: \[settings.cool\]: temperature='hot' is not allowed"):
        read(TASKS.replace("0.5", '"hot"')).check()
    with pytest.raises(ConfigError, match=r"sweep.toml:9: .*top_p=7"):
        read(TASKS.replace("[[tasks]]", "[grid]\ntop_p = [0.5, 7.0]\n\n[[tasks]]", 1)).check()


def test_an_override_is_not_looked_for_in_the_file(read, task_files):
    found = read(TASKS, "engine.max_num_seqs=0")
    with pytest.raises(ConfigError, match=r"^max_num_seqs=0"), found.locate_errors():
        raise ConfigError("max_num_seqs=0 is not allowed")
    with pytest.raises(ConfigError, match=r"sweep.toml:1: model='some/model'"), found.locate_errors():
        raise ConfigError("model='some/model': the path does not exist")
