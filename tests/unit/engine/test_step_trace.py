"""The trace of steps on disk: its bound, what it says of each step, and that nothing is there when it is off."""

import logging

import pytest

from rollout_engine import ConfigError
from rollout_engine.base.messages import EngineCoreRequest
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.engine.step_trace import Row, StepTrace, TracedSequence, TracedStep, read_traces


def step(number, rows, samples=(), **more):
    return TracedStep(step=number, version=0, at=float(number), seconds=0.5, rows=rows, samples=list(samples), **more)


def decode(number, start, ids=(1, 2)):
    return step(number, [Row(i, start, 1) for i in ids], [(i, row) for row, i in enumerate(ids)])


def trace_in(tmp_path, max_bytes=1 << 20):
    return StepTrace(str(tmp_path / "trace"), max_bytes, "model")


def test_what_is_written_is_read_back_and_repeated_rows_cost_nothing(tmp_path):
    trace = trace_in(tmp_path)
    first = step(0, [Row(1, 0, 8), Row(2, 0, 8)], [(1, 0), (2, 1)], new=[TracedSequence(1, 2**64 - 1, 8, 7)])
    written = [first, *(decode(i, 7 + i) for i in range(1, 4)), decode(4, 11, ids=(2,)), decode(5, 12, ids=(2,))]
    expected = [(each.step, each.rows, each.samples, each.new) for each in written]
    for each in written:
        trace.write(each)
    [found] = read_traces(tmp_path / "trace")
    assert [(each.step, each.rows, each.samples, each.new) for each in found.steps] == expected
    lines = trace.path.read_bytes().splitlines()
    assert [b'"rows"' in line for line in lines] == [False, True, True, False, False, True, False]


@pytest.mark.parametrize(
    "between",
    [
        step(2, [], released=[9]),
        step(2, [Row(1, 9, 1), Row(2, 9, 1)], [(1, 0), (2, 1)], problem="RuntimeError: x"),
        step(2, [Row(1, 9, 3, 2), Row(2, 9, 1)], [(1, 0), (2, 1)], drawn=[2, 1]),
    ],
    ids=["empty", "failed", "drafts"],
)
def test_rows_behind_any_other_step_are_written_out(tmp_path, between):
    trace = trace_in(tmp_path)
    for each in (decode(1, 8), between, step(3, []), decode(4, 10)):
        trace.write(each)
    [found] = read_traces(tmp_path / "trace")
    assert [len(each.rows) for each in found.steps] == [2, len(between.rows), 0, 2]
    assert found.steps[-1].rows == [Row(1, 10, 1), Row(2, 10, 1)]


def test_a_trace_keeps_its_bound_and_what_was_alive_when_its_oldest_file_began(tmp_path):
    trace = trace_in(tmp_path, max_bytes=8_000)
    trace.write(step(0, [Row(1, 0, 4)], new=[TracedSequence(1, 5, 4, 6), TracedSequence(2, 7, 4, 8)]))
    trace.write(step(1, [Row(1, 4, 1)], released=[2]))
    for i in range(2, 2_000):
        trace.write(step(i, [Row(1, 3 + 2 * i, 1)]))
    files = list((tmp_path / "trace").iterdir())
    assert len(files) == 2 and sum(file.stat().st_size for file in files) < 8_000 + 400
    [found] = read_traces(tmp_path / "trace")
    assert found.live == [TracedSequence(1, 5, 4, 6)]
    numbers = [each.step for each in found.steps]
    assert numbers == list(range(numbers[0], 2_000)) and numbers[0] > 1_000


def test_lines_that_were_cut_and_files_of_another_format_are_left_out(tmp_path):
    trace = trace_in(tmp_path)
    trace.write(decode(1, 8))
    with open(trace.path, "ab") as file:
        file.write(b'{"type":"step","step":2,"ver')
    (tmp_path / "trace" / "trace-x.jsonl").write_text(
        '{"type":"header","format":99,"pid":1,"time":0,"model":"m","live":[]}\n'
    )
    (tmp_path / "trace" / "trace-y.jsonl").write_text("[" * 10_000)
    assert [[each.step for each in found.steps] for found in read_traces(tmp_path / "trace")] == [[1]]


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(tmp_path, caplog, monkeypatch):
    trace = trace_in(tmp_path)

    def full(*_, **__):
        raise OSError("no space left")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        trace.write(decode(1, 8))
    trace.write(decode(2, 9))
    assert "The trace of steps ends" in caplog.text
    [found] = read_traces(tmp_path / "trace")
    assert found.steps == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="step_trace=.* is not allowed: must be a directory to write to"):
        StepTrace(str(tmp_path / "file"), 1 << 20, "m")


def test_a_step_that_fails_is_written_with_its_problem_and_those_behind_it_are_not(tmp_path):
    config = CoreConfig(
        num_blocks=48,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        vocab_size=97,
        async_scheduling=True,
    )
    core = EngineCore(FakeExecutor(block_size=4, vocab_size=97, fail_at_steps={2}), config)
    core.recorders.append(trace_in(tmp_path))
    for first in range(2):
        core.add_request(
            EngineCoreRequest(
                prompt_token_ids=[7] * 12,
                params=SamplingParams(),
                max_tokens=4,
                seed=first,
                first_sequence_id=first,
            )
        )
    while core.has_unfinished_requests():
        core.step()
    core.step()
    [found] = read_traces(tmp_path / "trace")
    problems = [each.problem for each in found.steps]
    assert [problem[:13] for problem in problems if problem] == ["RuntimeError:"]
    assert len(problems) == core.stats.num_steps
    assert all(each.seconds > 0 for each in found.steps)
