"""Layers that run compiled: the numbers of modules, the compiler asked at the start alone, and gone without it."""

import logging

import psutil
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout_engine import LLM, ConfigError, EngineConfig  # noqa: E402
from rollout_engine.model.cuda import (
    compile_trial,  # noqa: E402
    compiled_layers,  # noqa: E402
)
from rollout_engine.model.cuda.attention import Limits  # noqa: E402
from rollout_engine.model.cuda.compiled_layers import CompiledLayers  # noqa: E402
from rollout_engine.model.cuda.decoder_trial import served, small_model  # noqa: E402
from rollout_engine.model.cuda.largest_step import forward_largest_step  # noqa: E402
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME  # noqa: E402
from rollout_engine.model.modules.construct import construct  # noqa: E402
from rollout_engine.model.modules.decoder_structure import UnsupportedStructure  # noqa: E402
from rollout_engine.model.modules.geometry import probe_geometry  # noqa: E402
from rollout_engine.testing.models import tiny_config  # noqa: E402
from tests.unit.model.cuda.conftest import OPTIONS  # noqa: E402
from tests.unit.model.cuda.test_engine import GREEDY, assert_alike, run, runner_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),  # which torch's compiler still calls
    # Of the interpreter: arithmetic on infinities, which the kernels mean.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
LIMITS = Limits(num_tokens=6, num_sequences=1, context=16)


@pytest.fixture(autouse=True)
def patience(caplog, monkeypatch):
    """Time for slow machines, and none of the lines that torch's compiler writes by the thousand."""
    monkeypatch.setattr(compile_trial, "_SECONDS", 3600.0)
    caplog.set_level(logging.WARNING, "torch.__trace")


def as_captured(graph, inputs):
    """In place of the compiler, which takes seconds a graph."""
    return graph.forward


def build(device, architecture="olmo2", **sizes):
    """One whose layers none of our kernels runs as a whole; those of the default are all of one kind."""
    made = construct(tiny_config(architecture, **sizes), dtype=torch.float32, attention=ATTENTION_NAME).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in made.parameters():
        parameter.normal_(float(parameter.dim() == 1), 0.2, generator=generator)
    return made


@pytest.fixture
def module(device):
    return build(device)


@pytest.fixture
def geometry(module):
    return probe_geometry(module)


@pytest.fixture
def chosen(module, geometry, monkeypatch, caplog):
    """A function from seconds of the largest step, compiled and not, to what is chosen and what was said of it."""

    def choose(seconds, compiler=as_captured):
        monkeypatch.setattr(compiled_layers, "_inductor", compiler)
        monkeypatch.setattr(compile_trial, "_fastest", lambda ways: seconds)
        caplog.set_level(logging.INFO, "rollout_engine")
        found = compile_trial.compiled_layers(module, geometry, LIMITS)
        said = [record.getMessage() for record in caplog.records if record.name == "rollout_engine"]
        return found, said[-1]

    return choose


def check_inductor(module):
    """Its numbers are those of modules, under every weight; returns how many graphs there are."""
    geometry = probe_geometry(module)
    twin = CompiledLayers(module, len(geometry))
    seen = []
    with twin.compiling(seconds=3600.0):
        for factor in (1.0, 0.5):
            for parameter in module.parameters():
                parameter.mul_(factor)
            ours, theirs = (served(small_model(module, geometry, fused=False, compiled=c)) for c in (twin, None))
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            seen.append((ours, twin.num_graphs))
    assert not torch.equal(seen[0][0][0], seen[1][0][0])
    assert seen[0][1] == seen[1][1], "new weights were compiled for"
    return twin.num_graphs


@pytest.mark.slow
def test_inductor_gives_the_numbers_of_modules_from_one_graph_and_leaves_no_process(module):
    before = set(psutil.Process().children(recursive=True))
    assert check_inductor(module) == 1
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_layers_that_break_at_a_loop_over_experts_keep_their_numbers(device):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert check_inductor(build(device, "qwen3_moe", **sizes)) > 1


@pytest.mark.parametrize(("seconds", "kept"), [((0.1, 0.2), "compiled"), ((0.2, 0.1), "modules")])
@pytest.mark.slow
def test_the_faster_way_is_kept_and_both_times_are_told(chosen, seconds, kept):
    found, said = chosen(seconds)
    assert (found is not None) == (kept == "compiled")
    assert f"6 tokens in {seconds[0] * 1e3:.1f} ms compiled, {seconds[1] * 1e3:.1f} ms as modules" in said
    assert f"they run as {kept}. 2 graphs in" in said


@pytest.mark.slow
def test_both_ways_are_timed(module, geometry, monkeypatch):
    monkeypatch.setattr(compile_trial, "_ROUNDS", 1)
    twin = CompiledLayers(module, len(geometry))
    ways = [compile_trial._model(module, geometry, LIMITS, each) for each in (twin, None)]
    assert all(0 < seconds < 1e3 for seconds in compile_trial._fastest(ways))


def broken(graph, inputs):
    raise RuntimeError("no such instruction\nand much more")


def wrong(graph, inputs):
    return lambda *given: tuple(out * 1.5 for out in graph.forward(*given))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(broken, "RuntimeError: no such instruction"), (wrong, "ArithmeticError: its logits differ from its modules' by")],
)
def test_what_cannot_be_compiled_or_comes_out_wrong_is_told_and_gone_without(chosen, compiler, reason):
    found, said = chosen((0.1, 0.2), compiler)
    assert found is None
    assert reason in said and "and much more" not in said


def test_a_compiler_that_takes_too_long_is_told_and_gone_without(chosen, monkeypatch):
    monkeypatch.setattr(compile_trial, "_SECONDS", -1.0)
    found, said = chosen((0.1, 0.2))
    assert found is None
    assert "TimeoutError: 0 graphs took all the time allowed" in said


@pytest.mark.slow
def test_a_step_of_another_kind_never_waits_for_the_compiler(module, geometry, monkeypatch, caplog):
    monkeypatch.setattr(compiled_layers, "_inductor", as_captured)
    twin = CompiledLayers(module, len(geometry))
    with twin.compiling(seconds=3600.0):
        served(small_model(module, geometry, fused=False, compiled=twin))
    monkeypatch.setattr(compiled_layers, "_inductor", broken)
    one_token = LIMITS._replace(num_tokens=1)
    forward_largest_step(compile_trial._model(module, geometry, one_token, twin))
    assert twin.num_graphs == 1
    assert "it runs uncompiled" in caplog.text


def test_a_module_without_a_list_of_layers_is_not_compiled(module):
    with pytest.raises(UnsupportedStructure, match="no list of decoder layers"):
        CompiledLayers(module, 7)


class TestEngine:
    @pytest.fixture(params=[as_captured, pytest.param(compiled_layers._inductor, marks=pytest.mark.slow)])
    def engines_of(self, request, engine_on, monkeypatch):
        """An `LLM` that runs compiled layers, whichever way is the faster here, and one on the CPU."""
        monkeypatch.setattr(compiled_layers, "_inductor", request.param)
        monkeypatch.setattr(compile_trial, "_fastest", lambda ways: (1.0, 2.0))
        seed = int(request.param is as_captured)  # engines of their own, whose weights change together
        return engine_on("device", "gemma2", compile=True, seed=seed), engine_on("cpu", "gemma2", seed=seed)

    @pytest.mark.slow
    def test_steps_keep_their_numbers_through_sleep_and_commits_and_compile_nothing(self, engines_of):
        llm, reference = engines_of
        layers = runner_of(llm).model._compiled
        num_graphs = layers.num_graphs
        assert num_graphs > 0
        assert_alike(run(llm, GREEDY), run(reference, GREEDY))
        llm.sleep(1)
        llm.wake_up()
        assert_alike(run(llm, GREEDY), run(reference, GREEDY))
        weights = reference.llm_engine.apply_model(lambda module: {k: v * 1 for k, v in module.state_dict().items()})[0]
        changed = {name: tensor * 0.5 if "norm" in name else tensor for name, tensor in weights.items()}
        for each in (llm, reference):
            each.update_weights(changed)
        assert_alike(run(llm, GREEDY), run(reference, GREEDY))
        assert layers.num_graphs == num_graphs

    @pytest.mark.slow
    def test_scores_are_those_of_the_cpu_and_layers_can_be_watched(self, engines_of):
        (llm, _), seen = engines_of, []
        ours, theirs = (each.score([[7, 8, 9]], [[11, 12]])[0] for each in engines_of)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=2e-4, rtol=0)
        stop = runner_of(llm).model.layer_watch.watch(lambda layer, hidden: seen.append((layer, len(hidden))))
        run(llm, GREEDY, [[7, 8, 9]])
        stop()
        assert seen[:2] == [(0, 3), (1, 3)] and len(seen) == 2 * GREEDY.max_tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inductor_on_a_device_keeps_the_numbers_of_modules(checkpoints, caplog, monkeypatch):
    fastest, seen = compile_trial._fastest, []
    monkeypatch.setattr(compile_trial, "_fastest", lambda ways: seen.append(fastest(ways)) or (0.0, 1.0))
    found = []
    for is_compiled in (True, False):
        options = OPTIONS | {"device": "cuda", "num_kv_blocks": None, "gpu_memory_utilization": 0.3}
        with LLM(str(checkpoints("gemma2")), compile=is_compiled, **options) as llm:
            found.append(run(llm, GREEDY))
            assert (runner_of(llm).model._compiled is not None) == is_compiled
    assert_alike(*found, bound=1e-3)
    assert min(seen[0]) > 0
    assert "uncompiled" not in caplog.text


@pytest.mark.slow
def test_layers_that_are_fused_leave_nothing_to_compile(engine_on, caplog):
    caplog.set_level(logging.INFO, "rollout_engine")
    llm = engine_on("device", compile=True)
    assert runner_of(llm).model._compiled is None
    assert "compile=True has nothing to do" in caplog.text


def test_a_cpu_and_deterministic_bits_are_refused_by_name(checkpoints):
    with pytest.raises(ConfigError, match="compile=True is not possible on a CPU"):
        LLM(str(checkpoints("gemma2")), compile=True, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="compile=True and deterministic=True are both set"):
        EngineConfig(model="x", device="cuda", compile=True, deterministic=True)
