"""Evaluation sweeps over a tiny model: what is sampled, what is kept, and what is refused."""

import json
import threading

import pyarrow.parquet
import pytest

from envs_adapters import Observation
from rollout_engine import EvalReport, EvalTask, SamplingParams, read_jsonl, replay
from rollout_engine.base.errors import ConfigError, EpisodeError, RequestError, RewardError
from rollout_engine.rollouts.evaluation.sweep import seed_of
from tests.integration.evaluations.sweeps import ROWS, SETTINGS, TASK, essence, evaluated, has_letter, row_of


def test_every_sample_is_a_rollouts(policy):
    """The same seeds give the same tokens as `rollout` does."""
    report = evaluated(policy, seed=7)
    assert len(report.samples) == 2 * 4 * 3
    for name, settings in SETTINGS.items():
        seed = seed_of(7, "letters", name)
        batch = policy.rollout([row["prompt"] for row in ROWS], settings, num_samples=3, seed=seed, use_tqdm=False)
        found = [s for s in report.samples if s["evaluation"]["setting"] == name]
        assert [s["response"] for s in found] == list(batch["text", "response"])
        for sample in found:
            assert sample["reward"] == float(sample["columns"]["letter"] in sample["response"])


def test_estimates_are_means_over_prompts(policy):
    report = evaluated(policy, k=(1, 3))
    for name in SETTINGS:
        rewards = [
            [s["reward"] for s in report.samples if s["evaluation"]["setting"] == name and s["group_id"] == p]
            for p in range(4)
        ]
        mean = sum(sum(each) / 3 for each in rewards) / 4
        assert row_of(report, "mean", setting=name)["value"] == pytest.approx(mean)
        assert row_of(report, "pass@1", setting=name)["value"] == pytest.approx(mean)
        assert row_of(report, "pass@3", setting=name)["value"] == pytest.approx(sum(any(each) for each in rewards) / 4)
        row = row_of(report, "mean", setting=name)
        assert row["low"] <= mean <= row["high"] and row["num_prompts"] == 4 and row["num_samples"] == 12
    assert "pass@3" in str(report)


def test_a_reward_that_is_the_bound_is_correct(policy):
    """Rewards are float32, in which 0.7 is less than 0.7."""
    task = TASK.clone(reward_fn=lambda completions, letter: [0.7] * len(completions), correct_from=0.7)
    assert row_of(evaluated(policy, task), "pass@1", setting="hot")["value"] == 1.0


def test_answers_vote(policy):
    task = TASK.clone(answer=lambda text: text[:1] or None, name="first letter")
    report = evaluated(policy, task, k=3)
    for sample in report.samples:
        assert sample["evaluation"]["answer"] == (sample["response"][:1] or None)
    assert 0 <= row_of(report, "maj@3", setting="hot")["value"] <= 1


def test_a_grid_multiplies_the_settings(policy):
    sweep = {"settings": SamplingParams(max_tokens=4), "grid": {"temperature": [0.5, 1.0], "top_k": [0, 5]}}
    report = evaluated(policy, sweep=sweep, num_samples=1)
    assert list(report.plan["settings"]) == [
        f"max_tokens=4 temperature={t} top_k={k}" for t in (0.5, 1.0) for k in (0, 5)
    ]


def test_a_ledger_is_a_file_of_rollouts(policy, tmp_path):
    report = evaluated(policy, out=tmp_path)
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert sorted(map(repr, essence(samples))) == sorted(map(repr, essence(report.samples)))
    assert all(each.is_equal for each in replay(policy, samples))


def test_a_finished_evaluation_samples_nothing_again(policy, tmp_path):
    first = evaluated(policy, out=tmp_path)
    calls = []

    def counted(completions, letter):
        calls.append(completions)
        return has_letter(completions, letter)

    again = evaluated(policy, TASK.clone(reward_fn=counted), out=tmp_path)
    assert calls == [] and again.table == first.table
    assert EvalReport.read(tmp_path).table == first.table


@pytest.mark.quick(1)
@pytest.mark.parametrize("cut", [0, 1, 17, 400, 5000, 9001])
def test_a_ledger_cut_anywhere_is_completed_to_the_same_samples(policy, tmp_path, cut, caplog):
    whole = evaluated(policy, out=tmp_path / "whole")
    evaluated(policy, out=tmp_path / "cut")
    path = tmp_path / "cut" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    resumed = evaluated(policy, out=tmp_path / "cut")
    assert essence(resumed.samples) == essence(whole.samples)
    assert resumed.table == whole.table
    assert essence(EvalReport.read(tmp_path / "cut").samples) == essence(whole.samples)
    assert len(read_jsonl(path)) == len(whole.samples)
    assert ("was cut off" in caplog.text) == (cut > 0)


def test_more_samples_prompts_and_settings_join_those_that_are_there(policy, tmp_path):
    evaluated(policy, out=tmp_path, num_samples=2, sweep={"settings": {"hot": SETTINGS["hot"]}})
    before = (tmp_path / "samples.jsonl").read_bytes()
    grown = evaluated(policy, out=tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(before)
    assert essence(grown.samples) == essence(evaluated(policy).samples)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(seed=1), "seed=1 is not allowed: must be 0"),
        (dict(sweep={"settings": {"hot": {"max_tokens": 13}}}), "settings='hot'.*differs in max_tokens"),
        (dict(tasks=TASK.clone(rows=ROWS[::-1])), "tasks='letters'.*differs in digest"),
        (dict(tasks=TASK.clone(correct_from=0.5)), "tasks='letters'.*differs in digest"),
    ],
)
def test_another_evaluation_in_the_directory_is_refused(policy, tmp_path, change, told):
    evaluated(policy, out=tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(RequestError, match=told):
        evaluated(policy, out=tmp_path, **change)
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    assert len(evaluated(policy, out=tmp_path, resume=False, **change).samples) <= 24


def test_two_evaluations_do_not_write_to_one_directory(policy, tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def waits(completions, letter):
        inside.set()
        assert go_on.wait(60)
        return has_letter(completions, letter)

    thread = threading.Thread(target=evaluated, args=(policy, TASK.clone(reward_fn=waits)), kwargs={"out": tmp_path})
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(RequestError, match="Another evaluation is writing to it"):
            evaluated(policy, out=tmp_path)
    finally:
        go_on.set()
        thread.join()


def test_a_newer_schema_is_refused_by_name(policy, tmp_path):
    evaluated(policy, out=tmp_path)
    plan = json.loads((tmp_path / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps(plan | {"schema": 2}))
    for attempt in (lambda: EvalReport.read(tmp_path), lambda: evaluated(policy, out=tmp_path)):
        with pytest.raises(RequestError, match="schema=2.*at most 1.*newer rollout-engine"):
            attempt()
    with pytest.raises(RequestError, match="the directory of an evaluation"):
        EvalReport.read(tmp_path / "none")


class Guess:
    """Two turns; the reward is whether an answer has the letter that the seed determines."""

    def reset(self, seed):
        self.letter, self.turns = "etaoin"[seed % 6], 0
        return f"Say {self.letter}."

    def step(self, action):
        self.turns += 1
        return Observation("Again.", reward=0.5 * (self.letter in action.text), terminated=self.turns == 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("cut", [0, 3000])
def test_environments_are_tasks(policy, tmp_path, cut):
    tasks = {"guess": EvalTask(env=Guess, num_prompts=5), "letters": TASK}
    whole = evaluated(policy, tasks)
    assert {s["evaluation"]["task"] for s in whole.samples} == {"guess", "letters"}
    assert len(whole.samples) == 2 * 3 * (5 + 4)
    evaluated(policy, tasks, out=tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    assert essence(evaluated(policy, tasks, out=tmp_path).samples) == essence(whole.samples)
    for sample in whole.samples:
        if sample["evaluation"]["task"] == "guess":
            assert f"Say {'etaoin'[sample['group_id']]}." in sample["prompt"] and sample["num_turns"] == 2


class Down:
    """One turn that pays 1; odd starts fail while it is down, all of them while everything is."""

    is_down, is_everything_down = True, False

    def reset(self, seed):
        self.fails = Down.is_everything_down or (Down.is_down and seed % 2)
        return "Go."

    def step(self, action):
        if self.fails:
            raise ConnectionError("the sandbox is down")
        return Observation(reward=1.0, terminated=True)


def test_failed_episodes_are_counted_apart_and_made_again(policy, tmp_path, monkeypatch):
    task = {"flaky": EvalTask(env=Down, num_prompts=4)}
    monkeypatch.setattr(Down, "is_down", True)
    for _ in range(2):  # asked again while it is down, it fails again, and nothing is lost
        report = evaluated(policy, task, out=tmp_path)
        for setting in SETTINGS:
            failed, mean = (row_of(report, metric, setting=setting) for metric in ("failed", "mean"))
            assert (failed["value"], failed["num_prompts"], failed["num_samples"]) == (0.5, 4, 12)
            assert (mean["value"], mean["num_prompts"], mean["num_samples"]) == (1.0, 2, 6)
    monkeypatch.setattr(Down, "is_down", False)
    again = evaluated(policy, task, out=tmp_path)
    assert [(row["value"], row["num_samples"]) for row in again.table if row["metric"] == "failed"] == [(0.0, 12)] * 2
    assert (
        essence(EvalReport.read(tmp_path).samples) == essence(again.samples) == essence(evaluated(policy, task).samples)
    )


def test_an_environment_that_always_fails_ends_the_evaluation(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(Down, "is_everything_down", True)
    with pytest.raises(EpisodeError, match="task 'flaky'.*All 12 episodes failed; the first: .*the sandbox is down"):
        evaluated(policy, {"flaky": EvalTask(env=Down, num_prompts=4)}, out=tmp_path)


REWRITES = (
    "{% for m in messages %}<{{ m.role }}>{{ 'earlier: ' if m.role == 'assistant' and not loop.last }}{{ m.content }}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_an_episode_of_several_rows_is_one_sample_that_ends_with_its_last_answer(policy, tmp_path):
    task = EvalTask(
        env=Guess, num_prompts=3, episodes={"on_rewrite": "branch"}, chat={"chat_template": REWRITES}, answer=str
    )
    sweep = {"settings": {"long": {"max_tokens": 12, "ignore_eos": True}}}
    report = evaluated(policy, {"guess": task}, sweep=sweep, out=tmp_path)
    assert len(report.samples) == 3 * 3 and row_of(report, "length")["value"] == 24
    for sample in report.samples:
        assert set(sample["turns"]) == {1} and sample["num_turns"] == 2, "the second row"
        assert sample["evaluation"]["answer"] == sample["response"] and len(sample["response_token_ids"]) == 12
    report.to_parquet(tmp_path / "samples.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "samples.parquet").column("num_tokens").to_pylist() == [24] * 9
    assert evaluated(policy, {"guess": task}, sweep=sweep, out=tmp_path).table == report.table


def test_names_of_reasoning_gym_are_tasks(policy):
    pytest.importorskip("reasoning_gym")
    tasks = [EvalTask(env="spell_backward", num_prompts=3, env_options={"max_word_len": 4}), "reasoning_gym:chain_sum"]
    tasks[1] = EvalTask(env=tasks[1], num_prompts=2)
    report = evaluated(policy, tasks, num_samples=2)
    assert list(report.plan["tasks"]) == ["reasoning_gym:spell_backward", "reasoning_gym:chain_sum"]
    assert len(report.samples) == 2 * 2 * (3 + 2)


def test_errors_begin_with_the_task(policy):
    def fails(completions, letter):
        raise KeyError("nothing")

    with pytest.raises(RewardError, match="task 'letters', setting 'hot': prompts\\[0\\].*KeyError"):
        evaluated(policy, TASK.clone(reward_fn=fails))
    assert not policy.engine.has_unfinished_requests()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("tasks", "options", "told"),
    [
        ({"name": "x", "rows": ROWS, "reward_fun": has_letter}, {}, "Did you mean 'reward_fn'"),
        (EvalTask(rows=["a"], reward_fn=has_letter).clone(name="a"), {"k": 4}, "k=4 is not allowed.*num_samples=3"),
        (TASK, {"sweep": {"setting": {}}}, "Did you mean 'settings'"),
        (TASK, {"sweep": {"grid": {"temprature": [1]}}}, "Did you mean 'temperature'"),
        (TASK, {"sweep": {"settings": {"a": {"n": 2}}}}, "num_samples= says how many"),
        ([TASK, TASK], {}, "Two tasks have this one"),
        (EvalTask(env="reasoning_gym:spell_backwards"), {}, "Did you mean 'spell_backward'"),
        ({"rows": [{"question": "x"}], "reward_fn": has_letter}, {}, "prompt_column= names another key"),
        ([], {}, "at least one task"),
    ],
)
def test_mistakes_are_told(policy, tasks, options, told):
    with pytest.raises((RequestError, ConfigError), match=told):
        evaluated(policy, tasks, **options)


@pytest.mark.parametrize("fields", [{}, {"rows": ["a"]}, {"rows": ["a"], "env": "x:y", "reward_fn": has_letter}])
def test_a_task_is_rows_or_an_environment(fields):
    with pytest.raises(RequestError):
        EvalTask(**fields)


def test_parquet_has_a_row_per_sample_and_the_table(policy, tmp_path):
    report = evaluated(policy)
    report.to_parquet(tmp_path / "samples.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "samples.parquet")
    assert table.column("response_token_ids").to_pylist() == [s["response_token_ids"] for s in report.samples]
    assert table.column("seed").to_pylist() == [s["seed"] for s in report.samples]
    assert json.loads(table.schema.metadata[b"table"]) == report.table
    report.to_jsonl(tmp_path / "table.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert lines == report.table + report.differences
    with pytest.raises(RequestError, match="a file that can be written"):
        report.to_html(tmp_path / "none" / "page.html")
