"""A run that is watched: files that grow, lines that are half there, and texts that are shown and never obeyed."""

import asyncio
import json
import math
import os

import pytest

from rollout_engine import RequestError
from rollout_engine.cli.main import main
from rollout_engine.cli.watch import lines_of, sparkline, table
from rollout_engine.looking.followed_file import FollowedFile
from rollout_engine.looking.run_watch import RunWatch
from rollout_engine.looking.step_log import StepLog
from rollout_engine.looking.terminal import Dashboard
from tests.unit.looking.lines import HOSTILE, rollouts, write_lines


def append(path, text):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_a_half_written_line_is_kept_back_until_it_is_whole(tmp_path):
    path = tmp_path / "steps.jsonl"
    file = FollowedFile(path)
    assert file.read() == []  # not there yet
    append(path, "one\ntw")
    assert file.read() == [b"one"]
    append(path, "o")
    assert file.read() == []
    append(path, "\n\nthree\n")
    assert file.read() == [b"two", b"three"]


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path):
    path = tmp_path / "steps.jsonl"
    file = FollowedFile(path)
    append(path, "one\nhalf")
    assert file.read() == [b"one"]
    path.write_text("new\n")  # shorter, in place
    assert file.read() == [b"new"]
    append(tmp_path / "other", "another\nfile\n")
    os.replace(tmp_path / "other", path)
    assert file.read() == [b"another", b"file"]


def test_long_files_come_in_pieces_and_a_line_beyond_the_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_engine.looking.followed_file._MOST_READ", 10)
    monkeypatch.setattr("rollout_engine.looking.followed_file._LONGEST_LINE", 35)
    path = tmp_path / "steps.jsonl"
    append(path, "a" * 25 + "\n" + "b" * 45 + "\nshort\n")
    file, lines = FollowedFile(path), []
    for _ in range(12):
        lines += file.read()
    assert lines == [b"a" * 25, b"short"] and file.num_skipped == 1


def test_an_evaluation_is_told_from_a_run(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    assert "samples.jsonl is of an evaluation" in lines_of(RunWatch(tmp_path), 100)[-1]


def test_steps_and_rollouts_are_followed_as_they_grow(tmp_path):
    watch = RunWatch(tmp_path)
    assert not watch.read() and "No statistics yet" in lines_of(watch, 100)[-1]
    steps = StepLog(tmp_path / "run")
    steps(loss=2.0, zebra=1.0)
    write_lines(tmp_path / "run" / "rollouts.jsonl", rollouts(2, 2))
    assert watch.read()
    assert (watch.last_step, watch.num_samples) == (0, 4)
    steps(loss=1.0, kl=0.5)
    assert watch.read() and not watch.read()
    assert watch.series() == {"kl": [0.5], "loss": [2.0, 1.0], "zebra": [1.0]}
    shown = lines_of(watch, 100)
    assert shown[1].startswith("step 1: 4 samples, ")
    assert any(line.startswith("loss") and " 1 " in line and "1 to 2" in line for line in shown)
    assert max(map(len, shown)) <= 100


def test_without_steps_statistics_are_of_every_32_rollouts(tmp_path):
    samples = rollouts(8, 8)
    write_lines(tmp_path / "rollouts.jsonl", samples)
    watch = RunWatch(tmp_path)
    watch.read()
    series = watch.series()
    assert watch.is_estimated and len(series["reward/mean"]) == 2
    assert series["reward/mean"][0] == pytest.approx(sum(s["reward"] for s in samples[:32]) / 32)
    drawn = [logprob for sample in samples[32:] for logprob in sample["log_probs"]]
    assert series["entropy"][1] == pytest.approx(-sum(drawn) / len(drawn))
    assert series["staleness/max"] == [0, 0]  # a new version each two groups, none of an older one behind it
    assert any("since no steps are logged" in line for line in lines_of(watch, 100))


def test_staleness_is_to_the_newest_version_that_the_file_had_by_then(tmp_path):
    on_policy, late = rollouts(8, 4), rollouts(8, 4)
    late[20]["policy_version"][0] = 0  # of group 5, which version 2 sampled
    for name, samples in (("on policy", on_policy), ("late", late)):
        write_lines(tmp_path / name / "rollouts.jsonl", samples)
        watch = RunWatch(tmp_path / name)
        watch.read()
        assert watch.series()["staleness/max"] == [0 if name == "on policy" else 2]


def test_the_newest_samples_are_shown_before_there_are_statistics(tmp_path):
    write_lines(tmp_path / "rollouts.jsonl", rollouts(1, 3))
    watch = RunWatch(tmp_path)
    watch.read()
    shown = lines_of(watch, 100)
    assert any(line.startswith("No statistics yet") for line in shown)
    assert [f"answer {index}" in line for index, line in enumerate(shown[-3:])] == [True] * 3


def test_tokens_per_second_are_those_that_came_between_looks(tmp_path):
    times = iter([0.0, 10.0])
    watch = RunWatch(tmp_path, lambda: next(times))
    watch.read()
    samples = rollouts(1, 4)
    write_lines(tmp_path / "rollouts.jsonl", samples)
    watch.read()
    assert watch.tokens_per_second == pytest.approx(sum(len(s["log_probs"]) for s in samples) / 10)


def test_what_is_caught_up_with_at_first_does_not_count_as_coming_in(tmp_path, monkeypatch):
    times = iter(range(10))
    write_lines(tmp_path / "rollouts.jsonl", rollouts(1, 4))
    monkeypatch.setattr("rollout_engine.looking.followed_file._MOST_READ", 1_000)
    watch = RunWatch(tmp_path, lambda: float(next(times)))
    watch.read()
    assert watch.is_behind and watch.tokens_per_second is None
    assert "come in" not in lines_of(watch, 100)[1]
    while watch.is_behind:
        watch.read()
    watch.read()
    assert watch.num_samples == 4 and watch.tokens_per_second == 0
    assert lines_of(watch, 100)[1].endswith("0 tokens/s come in")


def test_lines_that_are_no_rollouts_or_steps_are_counted_and_left_out(tmp_path):
    good = rollouts(1, 1)[0]
    bad = [good | {"log_probs": ["x"] * len(good["log_probs"])}, good | {"schema": 99}, {"a": 1}, []]
    bad += [good | {"reward": math.inf}, good | {"reward": -math.inf}] * 32
    write_lines(tmp_path / "rollouts.jsonl", [*bad, good])
    (tmp_path / "steps.jsonl").write_text("{}\n" + "[" * 10**5 + "\n")
    watch = RunWatch(tmp_path)
    watch.read()
    assert (watch.num_samples, watch.num_bad_lines) == (1, 70)
    assert "70 lines cannot be read, and are left out" in lines_of(watch, 80)


def test_texts_are_shown_never_obeyed_and_cut(tmp_path, capsys):
    samples = [sample | {"response": HOSTILE + "x" * 10**6} for sample in rollouts(1, 2)]
    write_lines(tmp_path / "rollouts.jsonl", samples)
    StepLog(tmp_path)(**{"\x1b[31mname\n": 1.0})
    assert main(["watch", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\u202e" not in printed and "\N{SYMBOL FOR ESCAPE}[31m" in printed
    assert "<script>alert(1)</script>" in printed and max(map(len, printed.splitlines())) <= 120


def test_the_live_view_draws_what_is_new(tmp_path):
    steps = StepLog(tmp_path)
    steps(loss=3.0)
    watch = RunWatch(tmp_path)

    def read(columns):
        watch.read()
        return lines_of(watch, columns)

    async def drive():
        app = Dashboard(read, "[bold]markup[/bold]", 0.05)
        async with app.run_test(size=(100, 30)) as pilot:
            first = app.shown.plain
            steps(loss=1.0)
            while "step 1:" not in app.shown.plain:
                await pilot.pause(0.05)
            await pilot.press("q")
            return first, app.shown.plain

    first, second = asyncio.run(drive())
    assert "step 0:" in first and "loss" in second and "1 to 3" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing"], "DIR='missing' is not allowed: must be a directory"), ([".", "--every", "0"], "--every=0.0")],
)
def test_mistakes_are_answered_in_one_line(capsys, arguments, message):
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(RequestError):
        RunWatch("missing")


def test_the_live_view_is_refused_where_no_terminal_is(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a terminal" in (said := capsys.readouterr().err) and "--once" in said


def test_without_the_extra_looking_once_works_and_the_live_view_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rollout_engine.cli.watch.Dashboard", None)
    assert main(["watch", str(tmp_path)]) == 2
    assert 'pip install "rollout-engine[view]"' in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--once"]) == 0


def test_a_course_is_drawn_between_its_least_and_greatest():
    assert sparkline([0.0, 1.0, None, 0.5], 4) == "▁█·▅"
    assert sparkline([1.0] * 50, 3) == "▅▅▅" and sparkline([None], 5) == "·"
    [line] = table({"loss": [1.0, None]}, 80)
    assert "not finite" in line and "1 to 1" in line and json.dumps(line)
