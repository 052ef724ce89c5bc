"""What traces tell, of events made by hand and of a trace of this machine."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rollout_engine import LLM
from rollout_engine.testing import tiny_checkpoint
from tests.benchmarks import gpu_trace
from tests.benchmarks.gpu_shapes import Requests
from tests.benchmarks.traces import figures, last_steps, read


def event(category, name, start, duration, thread=1):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


STEPS = [event("user_annotation", "step", 100, 100), event("user_annotation", "step", 200, 100)]


def test_the_device_is_busy_while_any_of_its_streams_is():
    kernels = [event("kernel", "a", 110, 40, 7), event("kernel", "b", 130, 40, 8), event("gpu_memcpy", "c", 250, 20, 7)]
    found = figures([*STEPS, *kernels])
    assert found["num_steps"] == 2 and found["microseconds_per_step"] == 100
    assert found["busy_share"] == pytest.approx((60 + 20) / 200)
    assert found["gap_share"] == pytest.approx(120 / 200)
    assert [(gap["after"], gap["microseconds"]) for gap in found["largest_gaps"]] == [(70, 80), (170, 30), (0, 10)]


def test_what_lies_outside_the_steps_does_not_count():
    kernels = [event("kernel", "a", 0, 150), event("kernel", "b", 290, 500), event("kernel", "c", 900, 5)]
    found = figures([*STEPS, *kernels])
    assert found["busy_share"] == pytest.approx((50 + 10) / 200)
    assert found["kernels_per_step"] == 1


def test_a_gap_tells_what_the_host_spent_it_on_each_thing_for_itself():
    host = [
        event("user_annotation", "schedule", 100, 60),
        event("cpu_op", "aten::add", 110, 30),
        event("cuda_runtime", "cudaLaunchKernel", 120, 10),
        event("cpu_op", "aten::mul", 100, 200, thread=2),
    ]
    found = figures([*STEPS, *host, event("kernel", "a", 150, 150)])
    (gap,) = found["largest_gaps"]
    assert gap["microseconds"] == 50
    assert gap["host"] == {"aten::mul": 50, "aten::add": 20, "schedule": 20, "cudaLaunchKernel": 10}


def test_launches_waits_and_copies_are_told_a_step():
    host = [
        event("cuda_runtime", "cudaGraphLaunch", 110, 5),
        event("cuda_driver", "cuLaunchKernelEx", 120, 5),
        event("cuda_runtime", "cudaLaunchKernel", 210, 5),
        event("cuda_runtime", "cudaEventSynchronize", 220, 5),
        event("cuda_runtime", "cudaMemcpyAsync", 230, 5),
    ]
    copies = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 150, 1),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 160, 1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 250, 1),
    ]
    found = figures([*STEPS, *host, *copies])
    assert found["launches_per_step"] == 1.5
    assert found["waits_per_step"] == 0.5
    assert found["copies_per_step"] == {"HtoD": 1.0, "DtoH": 0.5}


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="none: annotate the steps"):
        figures([event("kernel", "a", 0, 1)])


def test_the_last_steps_keep_their_events_and_the_names_of_threads():
    name = {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "stream 7"}}
    early, late = event("kernel", "early", 150, 5), event("kernel", "late", 250, 5)
    assert last_steps([name, *STEPS, early, late], 1) == [name, STEPS[1], late]


def test_events_of_torchs_own_traces_are_understood(tmp_path):
    x = torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("step"):
                torch.mm(x, x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    events = read(tmp_path / "trace.json")
    assert read(tmp_path / "trace.json.gz") == events
    found = figures(events, device=("cpu_op",))
    assert found["num_steps"] == 3 and 0 < found["busy_share"] <= 1
    assert all("step" in gap["host"] for gap in found["largest_gaps"] if gap["host"])
    kept = last_steps(events, 2)
    assert figures(kept, device=("cpu_op",))["num_steps"] == 2
    assert json.loads(json.dumps(kept)) == kept


def test_steps_of_an_engine_are_told_part_by_part(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path)), skip_tokenizer_init=True, log_stats=False, num_kv_blocks=64)
    engine = llm.llm_engine
    gpu_trace.annotate(engine)
    gpu_trace.ask(engine, Requests([[7, 8, 9], [11] * 20], [12, 12]), num_sampled=12)
    arrival = Requests([[5, 6]], [1])
    events = gpu_trace.profiled(engine, 4, before=lambda: gpu_trace.ask(engine, arrival, num_sampled=1))
    while engine.has_unfinished_requests():
        engine.step()
    llm.shutdown()
    found = figures(events)
    assert found["num_steps"] == 4 and found["gap_share"] == 1
    (gap,) = found["largest_gaps"]
    names = [each["name"] for each in events if each.get("cat") == "user_annotation"]
    assert all(names.count(part) >= 4 for part in ("step", "schedule", "launch", "update", "outputs"))
    assert gap["host"]
