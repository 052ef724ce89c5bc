"""Profiles of one process: one at a time, and none is lost."""

import json
from pathlib import Path

import pytest
import torch

from rollout_engine.base.errors import LifecycleError, RequestError, RolloutEngineError
from rollout_engine.execution.profiler import Profiler


@pytest.fixture
def profiler(tmp_path):
    made = Profiler(str(tmp_path))
    yield made
    made.close()


def names(path):
    return [event["name"] for event in json.loads(Path(path).read_text())["traceEvents"]]


def test_operations_are_in_the_trace(profiler, tmp_path):
    profiler.start(None)
    torch.ones(3).sum()
    path = profiler.stop()
    assert "aten::sum" in names(path) and [each.name for each in tmp_path.iterdir()] == [path.rpartition("/")[2]]


def test_traces_of_one_second_have_names_of_their_own(profiler, tmp_path):
    for _ in range(2):
        profiler.start(None)
        profiler.stop()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("directory", ["", "relative", "/proc/nowhere", "/" + "x" * 5000, "/a\0b"])
def test_a_directory_that_cannot_be_written_to_is_refused(profiler, tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="start_profile: directory=.* must be a directory that the engine can write"):
        profiler.start(directory)
    assert not list(tmp_path.iterdir())
    profiler.start(None)


def test_a_second_engine_of_the_process_is_refused_until_the_first_has_ended(profiler, tmp_path):
    other = Profiler(str(tmp_path / "other"))
    profiler.start(None)
    with pytest.raises(LifecycleError, match="another engine of this process is being profiled"):
        other.start(None)
    assert not list((tmp_path / "other").iterdir())
    profiler.stop()
    other.start(None)
    other.stop()


def test_a_profile_of_the_users_own_is_left_alone(profiler, tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        with pytest.raises(LifecycleError, match="your own code profiles this process"):
            profiler.start(None)
        torch.ones(3).sum()
    assert any(event.name == "aten::sum" for event in own.events())
    assert not list(tmp_path.iterdir())
    profiler.start(None)
    assert profiler.stop()


def test_a_profile_that_another_took_the_place_of_is_an_error(profiler, tmp_path):
    profiler.start(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(3).sum()
    with pytest.raises(RolloutEngineError, match="another profile of this process began meanwhile"):
        profiler.stop()
    assert not list(tmp_path.iterdir())
    profiler.start(None)
    assert profiler.stop()


def test_a_trace_that_cannot_be_written_is_an_error_and_the_next_one_can(profiler, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    profiler.start(None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", full)
        with pytest.raises(RolloutEngineError, match="cannot be written: No space left on device"):
            profiler.stop()
    profiler.start(None)
    assert "aten::sum" not in names(profiler.stop())


def test_the_trace_of_an_engine_that_is_shut_down_is_kept(profiler):
    profiler.start(None)
    torch.ones(3).sum()
    profiler.close()
    assert "aten::sum" in names(profiler.stop())
    with pytest.raises(LifecycleError, match="no profile is running"):
        profiler.stop()
