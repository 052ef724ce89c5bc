"""Whatever requests ask for, no step launches a kernel that was not compiled at load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_engine.model.cuda import backend
from rollout_engine.model.cuda.warm_up import warm_up
from rollout_engine.model.sampling.logit_rows import aligned_rows, row_pieces
from tests.unit.model.cuda.test_engine import DRAWN, assert_alike, run, runner_of

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
LAYERS = {"_norm_kernel", "_rotary_kernel", "_gated_kernel"}
EVERY_STEP = {"_list_items", "_share_out", "attention_kernel", "merge_kernel", "_block_copy_kernel"}
DRAWS = {f"_{name}_kernel" for name in ("chunk", "row", "active", "edge", "top", "outcome")}
DRAWS |= {f"_{name}_kernel" for name in ("copy_edited", "edit", "edited_outcome")}


def kernels(*arguments):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.model.cuda.kernels_of_steps", *arguments]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_random_steps_launch_only_what_was_launched_at_load():
    found = kernels("qwen3", "bfloat16")
    assert found["later"] == []
    assert set(found["launched"]) == LAYERS | EVERY_STEP | DRAWS | {"_prepare_kernel"}
    assert found["num_preemptions"] and found["num_graphs"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("qwen3", "bfloat16", "deterministic=true"),
        ("llama", "float32", "cuda_graphs=false", "block_size=32"),
        ("qwen2", "float32", "enable_prefix_caching=false"),
        ("qwen3", "bfloat16", "max_num_seqs=1", "max_num_batched_tokens=8"),
        ("gemma2", "bfloat16"),
        ("qwen3_moe", "bfloat16"),
        ("mixtral", "bfloat16", "deterministic=true"),
        ("qwen3_5_text", "bfloat16", "deterministic=true"),
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_so_do_those_of_other_models_and_options(arguments):
    assert kernels(*arguments)["later"] == []


@pytest.mark.slow
def test_without_these_steps_at_load_kernels_would_be_compiled_for_requests():
    later = kernels("qwen3", "bfloat16", "cold=true")["later"]
    assert {each.split()[0] for each in later} >= DRAWS | {"_prepare_kernel", "_block_copy_kernel"}


@pytest.mark.slow
def test_the_steps_at_load_leave_nothing_behind_and_change_no_bit(engine_on):
    llm = engine_on("device")
    runner = runner_of(llm)
    plain = run(llm, DRAWN)
    warm_up(runner)
    assert runner.num_sequences == 0 and runner.block_tables() == {}
    llm.reset_prefix_cache()
    assert_alike(run(llm, DRAWN), plain, bound=0)


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_a_warning_and_requests_that_need_it_fail_alone(
    engine_on, monkeypatch, caplog
):
    llm = engine_on("device")

    def fail(*args):
        raise RuntimeError("ptxas: internal error\nmore")

    with monkeypatch.context() as patch:
        patch.setattr("rollout_engine.model.cuda.sampler.edit", fail)
        warm_up(runner_of(llm))
    assert "Kernels could not all be compiled" in caplog.text and "RuntimeError: ptxas: internal error" in caplog.text
    assert runner_of(llm).num_sequences == 0
    assert all(len(tokens) == DRAWN.max_tokens for tokens, _ in run(llm, DRAWN))


@pytest.mark.slow
def test_an_engine_runs_them_at_load_wherever_kernels_are_compiled(checkpoints, monkeypatch, engine_on, engines):
    """With a given size of the KV pool too: no largest step is measured then."""
    warmed = []
    monkeypatch.setattr(backend, "compiles_kernels", lambda: True)
    monkeypatch.setattr(backend, "warm_up", warmed.append)
    llm = engine_on("device", num_kv_blocks=9)
    assert warmed == [runner_of(llm)]


def test_pieces_of_many_rows_begin_at_aligned_addresses():
    assert [aligned_rows(count) for count in (0, 1, 15, 16, 17, 47, 1766)] == [1, 1, 15, 16, 16, 32, 1760]
    pieces = row_pieces(4000, 151_936, torch.device("cuda"))
    assert [piece.start % 16 for piece in pieces] == [0, 0, 0] and pieces[-1].stop == 4000
