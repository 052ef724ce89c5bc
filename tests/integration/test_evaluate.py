"""Evaluation sweeps over a tiny model: what is sampled, what is kept, and what is refused."""

import json
import os
import threading

import pyarrow.parquet
import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from envs_adapters import Observation
from rollout_engine import EvalReport, EvalTask, RolloutPolicy, SamplingParams, Sweep, read_jsonl, replay
from rollout_engine.errors import ConfigError, RequestError, RewardError
from rollout_engine.evaluation.sweep import seed_of
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from tests.integration.test_replay import other_weights

OPTIONS = dict(dtype="float32", num_kv_blocks=1024, max_model_len=256)
ROWS = [
    {"prompt": text, "letter": letter} for text, letter in zip(["one", "two", "three", "four"], "etao", strict=True)
]
SETTINGS = {"hot": {"max_tokens": 12}, "cool": {"max_tokens": 12, "temperature": 0.5}}


def has_letter(completions, letter):
    return [float(each in text) for text, each in zip(completions, letter, strict=True)]


TASK = EvalTask(name="letters", rows=ROWS, reward_fn=has_letter)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moved(checkpoint, tmp_path_factory):
    return [other_weights(checkpoint, tmp_path_factory.mktemp("moved") / str(seed), seed) for seed in (1, 2)]


@pytest.fixture
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        yield policy


def evaluated(policy, tasks=TASK, **options):
    return policy.evaluate(tasks, **({"sweep": {"settings": SETTINGS}, "num_samples": 3, "use_tqdm": False} | options))


def essence(samples):
    """The values that have to be the same in an evaluation that was resumed."""
    return [
        (
            s["evaluation"],
            s["group_id"],
            s["sample_index"],
            s["seed"],
            s["response_token_ids"],
            s["log_probs"],
            s["reward"],
        )
        for s in samples
    ]


def row_of(report, metric, **where):
    [row] = [r for r in report.table if r["metric"] == metric and where.items() <= r.items()]
    return row


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


def test_a_sweep_over_checkpoints_has_paired_differences(policy, checkpoint, moved, tmp_path):
    names = {"first": str(checkpoint), "second": str(moved[0]), "third": str(moved[1])}
    report = evaluated(policy, sweep=Sweep(settings=SETTINGS, checkpoints=names), out=tmp_path / "out")
    assert report.checkpoints == list(names)
    assert len(report.samples) == 3 * 2 * 4 * 3
    pairs = {(row["baseline"], row["checkpoint"]) for row in report.differences}
    assert pairs == {("first", "second"), ("first", "third"), ("second", "third")}
    for row in report.differences:
        a, b = (
            row_of(report, row["metric"], checkpoint=row[w], setting=row["setting"]) for w in ("baseline", "checkpoint")
        )
        assert row["value"] == pytest.approx(b["value"] - a["value"])
        assert 0 < row["p_value"] <= 1
    seeds = {name: [s["seed"] for s in report.samples if s["evaluation"]["checkpoint"] == name] for name in names}
    assert seeds["first"] == seeds["second"] == seeds["third"]
    digests = {tuple(s["weights"].values()) for s in report.samples}
    assert len(digests) == 3 and all(len(each) == 1 for each in digests)


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


def test_versions_of_a_live_policy_are_named_and_said(policy, moved, tmp_path):
    evaluated(policy, out=tmp_path)
    policy.update_weights(str(moved[0]))
    report = evaluated(policy, out=tmp_path)
    assert report.checkpoints == ["version 0", "version 1"]
    assert row_of(report, "mean", checkpoint="version 1", setting="hot")["versions"] == [1]
    assert report.differences


def test_updates_meanwhile_are_seen_in_the_report(policy, checkpoint, moved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(moved[0])
    updated = []

    def update_once(completions, letter):
        if not updated:
            updated.append(policy.update_weights(model))
        return has_letter(completions, letter)

    rows = [row | {"prompt": f"{row['prompt']} {i}"} for i in range(8) for row in ROWS]
    report = evaluated(policy, TASK.clone(rows=rows, reward_fn=update_once))
    assert row_of(report, "mean", setting="cool")["versions"] in ([0, 1], [1])
    versions = {version for sample in report.samples for version in sample["policy_version"]}
    assert versions == {0, 1}


def test_other_weights_under_a_name_are_refused(policy, checkpoint, moved, tmp_path):
    os.symlink(moved[0], tmp_path / "weights")
    sweep = {"settings": SETTINGS, "checkpoints": {"best": str(tmp_path / "weights")}}
    evaluated(policy, out=tmp_path / "out", sweep=sweep, num_samples=1)
    os.unlink(tmp_path / "weights")
    os.symlink(moved[1], tmp_path / "weights")
    with pytest.raises(RequestError, match="checkpoints\\['best'\\].*Its weights were others"):
        evaluated(policy, out=tmp_path / "out", sweep=sweep, num_samples=2)


def test_other_weights_are_refused_though_no_sample_is_missing(policy, moved, tmp_path):
    """By another path under the same name, and as the live weights of another policy."""
    sweeps = [{"settings": SETTINGS, "checkpoints": {"best": str(path)}} for path in moved]
    first = evaluated(policy, out=tmp_path / "named", sweep=sweeps[0])
    with pytest.raises(RequestError, match="checkpoints\\['best'\\].*Its weights were others"):
        evaluated(policy, out=tmp_path / "named", sweep=sweeps[1])
    os.symlink(moved[0], tmp_path / "link")
    again = {"settings": SETTINGS, "checkpoints": {"best": str(tmp_path / "link")}}
    assert evaluated(policy, out=tmp_path / "named", sweep=again).table == first.table
    for path, is_first in ((moved[0], True), (moved[1], False)):
        with RolloutPolicy.from_pretrained(path, **OPTIONS) as other:
            if is_first:
                evaluated(other, out=tmp_path / "live")
            else:
                with pytest.raises(RequestError, match="checkpoints\\['version 0'\\].*Its weights were others"):
                    evaluated(other, out=tmp_path / "live")


def test_a_checkpoint_that_is_gone_is_named_before_anything_is_sampled(policy, moved, tmp_path):
    sweep = {"settings": SETTINGS, "checkpoints": [str(moved[0]), str(tmp_path / "gone")]}
    with pytest.raises(RequestError, match="gone.*a path that exists"):
        evaluated(policy, sweep=sweep, out=tmp_path / "out")
    assert (tmp_path / "out" / "samples.jsonl").stat().st_size == 0


def test_a_checkpoint_that_is_gone_is_not_missed_once_it_is_measured(policy, checkpoint, tmp_path):
    weights = other_weights(checkpoint, tmp_path / "weights", 5)
    sweep = {"settings": SETTINGS, "checkpoints": {"old": str(weights)}}
    first = evaluated(policy, sweep=sweep, out=tmp_path / "out")
    weights.rename(tmp_path / "elsewhere")
    assert evaluated(policy, sweep=sweep, out=tmp_path / "out").table == first.table


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


def test_adapters_are_checkpoints_over_the_live_weights(policy, tmp_path):
    ours, other = (random_adapter(tiny_model(), name, seed=seed) for name, seed in (("ours", 1), ("other", 2)))
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "adapter_config.json").write_text(json.dumps(other.sendable().config))
    save_file(
        {name: tensor.contiguous() for name, tensor in other.tensors.items()}, saved / "adapter_model.safetensors"
    )
    sweep = {"settings": SETTINGS, "checkpoints": {"ours": ours, "saved": saved}}
    report = evaluated(policy, sweep=sweep, out=tmp_path / "out", seed=7)
    assert policy.list_loras() == [] and policy.policy_version == 0
    policy.add_lora(ours)
    for name, settings in SETTINGS.items():
        options = dict(num_samples=3, seed=seed_of(7, "letters", name), lora_request="ours", use_tqdm=False)
        batch = policy.rollout([row["prompt"] for row in ROWS], settings, **options)
        found = [
            s for s in report.samples if (s["evaluation"]["checkpoint"], s["evaluation"]["setting"]) == ("ours", name)
        ]
        assert [s["response"] for s in found] == [batch["text", "response"][i] for i in range(12)]
    assert {s["lora"]["name"] for s in report.samples} == {"ours", "saved"}
    tokens = {name: [s["response"] for s in report.samples if s["lora"]["name"] == name] for name in ("ours", "saved")}
    assert tokens["ours"] != tokens["saved"]
    assert essence(evaluated(policy, sweep=sweep, out=tmp_path / "out", seed=7).samples) == essence(report.samples)
    assert all(each.is_equal for each in replay(policy, [s for s in report.samples if s["lora"]["name"] == "ours"]))
