"""What can be told of the device benchmark without a device."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_figures import show
from tests.benchmarks.gpu_shapes import Requests, least_seconds, write_config

pytest.importorskip("triton", reason="Triton is not installed")

from rollout_engine import LLM, exact  # noqa: E402
from rollout_engine.testing import tiny_checkpoint, tiny_model  # noqa: E402
from tests.benchmarks import gpu, gpu_exact, gpu_weights, traces  # noqa: E402


def test_the_requests_are_those_of_the_field():
    requests = Requests.drawn()
    assert len(requests.prompts) == 256
    assert all(100 <= n <= 1024 for n in [*map(len, requests.prompts), *requests.num_sampled])


def test_the_roofline_is_that_of_bytes_and_products():
    requests = Requests([[1] * 100], [10])
    assert requests.num_kv_reads == 10 * 100 + 45
    kv_only = least_seconds("Qwen3-0.6B", requests, 1e9, 1e30) - 10 * 0.596e9 * 2 / 1e9
    assert kv_only == pytest.approx(1045 * 114_688 / 1e9, abs=0.02)


@pytest.mark.parametrize(
    ("name", "architecture"), [("Llama-3.2-1B", "LlamaForCausalLM"), ("Gemma-2-2B", "Gemma2ForCausalLM")]
)
def test_configurations_are_read_by_transformers(tmp_path, name, architecture):
    config = json.loads((write_config(tmp_path, name) / "config.json").read_text())
    assert config["architectures"] == [architecture]


@pytest.mark.parametrize(("name", "count"), [("Qwen3-8B", 8.191e9), ("Qwen3-1.7B", 1.721e9), ("Qwen3-0.6B", 0.596e9)])
def test_shapes_have_as_many_weights_as_the_models_of_their_names(name, count):
    assert sum(map(math.prod, gpu_weights.sizes_of(name).values())) == pytest.approx(count, rel=1e-3)


def test_a_trainer_of_other_weights_is_told_from_the_exact_one(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path)), skip_tokenizer_init=True, log_stats=False, num_kv_blocks=16)
    trainer = exact.enable(tiny_model())
    requests = Requests([[7, 8, 9], [11] * 20], [5, 9])
    try:
        found = gpu_exact.mismatches(llm, trainer, requests)
        assert found["num_tokens"] == 14 and found["num_mismatches"] == 0
        trainer.lm_head.weight.data.mul_(1.01)
        assert gpu_exact.mismatches(llm, trainer, requests)["num_mismatches"] > 7
    finally:
        llm.shutdown()


@pytest.fixture
def device_assumed(monkeypatch):
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.usefixtures("device_assumed")
def test_a_part_that_fails_leaves_its_error_in_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu", "--parts", "limits", "--results", str(tmp_path)])
    gpu.main()
    (path,) = tmp_path.glob("*/*.json")
    assert "error" in json.loads(path.read_text())["figures"]["limits"]


@pytest.mark.usefixtures("device_assumed")
def test_a_trace_lies_beside_the_figures(tmp_path, monkeypatch, capsys):
    events = [{"ph": "M", "name": "thread_name"}]
    monkeypatch.setattr(gpu, "_run", lambda part, seconds: {"events": events, "decode": {"busy_share": 0.9}})
    monkeypatch.setattr("sys.argv", ["gpu", "--parts", "trace", "--results", str(tmp_path)])
    gpu.main()
    (figures,) = tmp_path.glob("*/*.json")
    assert json.loads(figures.read_text())["figures"]["trace"]["decode"] == {"busy_share": 0.9}
    assert traces.read(figures.with_suffix(".trace.json.gz")) == events


@pytest.mark.usefixtures("device_assumed")
def test_parts_that_hang_end_within_nine_minutes_and_each_is_accounted_for(tmp_path, monkeypatch, capsys):
    now = [1000.0]

    def hang(part, seconds):
        now[0] += seconds
        return {"error": "not done"}

    monkeypatch.setattr(gpu, "_run", hang)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.argv", ["gpu", "--results", str(tmp_path)])
    gpu.main()
    assert now[0] - 1000.0 <= 9 * 60 - 15  # torch is imported, too
    (figures,) = tmp_path.glob("*/*.json")
    assert json.loads(figures.read_text())["figures"].keys() == gpu.PARTS.keys()


@pytest.mark.parametrize("script", ["attention_gpu.py", "kernels_gpu.py"])
def test_benchmarks_of_kernels_tell_their_options(script, monkeypatch, capsys):
    folder = Path(__file__).parent
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(folder / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--replays", "--tune", "--json"))


def test_a_figure_is_shown_before_the_next_is_measured(capsys):
    def measure():
        yield "first", 1.5
        assert capsys.readouterr().out.split() == ["first", "1.5"]
        yield "second", 2

    show(measure(), as_json=False)
    assert capsys.readouterr().out.split() == ["second", "2"]
