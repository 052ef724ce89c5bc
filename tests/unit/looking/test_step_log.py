"""Steps in a file and in trackers: numbering, what is not finite, and trackers that fail."""

import errno
import json
import math

import numpy as np
import pytest
import torch

from rollout_engine import ConfigError, RequestError, StepLog
from rollout_engine.looking import steps_file
from rollout_engine.looking.steps_file import LoggedStep, read_steps
from tests.unit.looking.fakes import install
from tests.unit.looking.test_statistics import batch_of


class Recorder:
    """A tracker of one's own."""

    def __init__(self):
        self.steps, self.num_closed = [], 0

    def log(self, step, numbers):
        self.steps.append((step, dict(numbers)))

    def close(self):
        self.num_closed += 1


class Failing(Recorder):
    def log(self, step, numbers):
        super().log(step, numbers)
        raise OSError("disk full")


def test_a_step_goes_to_the_file_and_to_every_tracker(tmp_path):
    recorder = Recorder()
    with StepLog(tmp_path / "run", trackers=[recorder]) as steps:
        numbers = steps(batch_of(), loss=torch.tensor(0.5, requires_grad=True), rate=np.float32(0.25))
        steps(batch_of())
    [first, second] = read_steps(tmp_path / "run" / "steps.jsonl")
    assert (first.step, second.step) == (0, 1)
    assert first.numbers == numbers == recorder.steps[0][1]
    assert numbers["loss"] == 0.5 and numbers["rate"] == 0.25 and numbers["entropy"] == 1.25
    assert recorder.num_closed == 1
    assert steps.rollouts == tmp_path / "run" / "rollouts.jsonl"


def test_a_number_that_is_not_finite_is_null_in_the_file_and_itself_in_trackers(tmp_path):
    recorder = Recorder()
    steps = StepLog(tmp_path, trackers=[recorder])
    steps(loss=math.nan, norm=math.inf)
    assert json.loads((tmp_path / "steps.jsonl").read_text())["numbers"] == {"loss": None, "norm": None}
    assert math.isnan(recorder.steps[0][1]["loss"])


def test_steps_go_on_behind_those_of_the_directory_also_after_a_line_was_cut(tmp_path):
    StepLog(tmp_path)(step=4, loss=1.0)
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"schema": 1, "step": 5, "ti')
    steps = StepLog(tmp_path)
    steps(loss=2.0)
    assert [(step.step, step.numbers) for step in read_steps(tmp_path / "steps.jsonl")] == [
        (4, {"loss": 1.0}),
        (5, {"loss": 2.0}),
    ]
    with pytest.raises(RequestError, match="step=3 is not allowed: must be at least 6"):
        steps(step=3)


def test_a_tracker_that_fails_is_left_out_and_the_training_goes_on(tmp_path, caplog):
    failing, recorder = Failing(), Recorder()
    with StepLog(tmp_path, trackers=[failing, recorder]) as steps:
        steps(loss=1.0)
        steps(loss=2.0)
    assert len(failing.steps) == 1 and len(recorder.steps) == 2 and len(read_steps(tmp_path / "steps.jsonl")) == 2
    assert "The tracker Failing failed at step 0; it gets no more." in caplog.text


def test_a_full_disk_costs_lines_and_not_the_training(tmp_path, monkeypatch, caplog):
    append, failures = steps_file.append_text, [True, True, False]

    def fills_up(path, text, **options):
        if failures.pop(0):
            append(path, text[:20], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text, **options)

    monkeypatch.setattr(steps_file, "append_text", fills_up)
    with StepLog(tmp_path) as steps:
        assert [steps(loss=loss)["loss"] for loss in (3.0, 2.0, 1.0)] == [3.0, 2.0, 1.0]
    [step] = read_steps(tmp_path / "steps.jsonl")
    assert (step.step, step.numbers["loss"]) == (2, 1.0)
    [record] = caplog.records
    assert "step 0 is missing" in record.getMessage() and "No space left" in record.getMessage()


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0], torch.zeros(2)], ids=str)
def test_what_is_no_number_is_refused_and_nothing_is_logged(tmp_path, value):
    steps = StepLog(tmp_path)
    with pytest.raises(RequestError, match="loss=.* is not allowed: must be a number"):
        steps(loss=value)
    assert read_steps(tmp_path / "steps.jsonl") == []


def test_mistakes_are_answered_when_the_log_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="a file that can be written"):
        StepLog(tmp_path / "file")
    with pytest.raises(ConfigError, match="Unknown tracker 'tensorbord'. Did you mean 'tensorboard'?"):
        StepLog(tmp_path, trackers=["tensorbord"])
    with pytest.raises(ConfigError, match="has no method log, close"):
        StepLog(tmp_path, trackers=[object()])
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="The tracker 'wandb' needs the package wandb: pip install wandb"):
        StepLog(tmp_path, trackers="wandb")


def test_lines_that_are_no_steps_are_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    good = json.dumps({"schema": 1, "step": 0, "time": 1.0, "numbers": {"a": 1, "b": "x", "c": None}})
    path.write_text("\n".join(["[1]", '{"schema": 2}', "[" * 10**5, "\x00", good, good[:-3]]))
    assert read_steps(path) == [LoggedStep(0, 1.0, {"a": 1.0, "b": None, "c": None})]


def test_every_tracker_gets_the_numbers_of_each_step(tmp_path, monkeypatch):
    """Small fakes record the calls; `make test-trackers` has the real packages."""
    calls = install(monkeypatch)
    with StepLog(tmp_path / "run", trackers=["tensorboard", "wandb", "trackio", "mlflow"]) as steps:
        steps(loss=0.5)
        steps(loss=0.25)
    run = str(tmp_path / "run")
    assert [call[1:] for call in calls if call[0] == "tensorboard"] == [
        ("made", run),
        ("loss", 0.5, 0),
        ("loss", 0.25, 1),
        ("closed",),
    ]
    for package in ("wandb", "trackio", "mlflow"):
        made, *logged, closed = [call[1:] for call in calls if call[0] == package]
        assert [call[:2] for call in logged] == [({"loss": 0.5}, 0), ({"loss": 0.25}, 1)]
        assert made[0] == "made" and closed == ("closed",)
    [options] = [call[2] for call in calls if call[:2] == ("wandb", "made")]
    assert options == {"dir": run, "mode": "offline", "project": "rollout-engine", "name": "run"}
    assert ("mlflow", "made", f"sqlite:///{run}/mlflow.db") in calls
