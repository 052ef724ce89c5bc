"""Types tried anew have the rows of results.json, and a trial notices what is wrong."""

import pytest
import torch
import transformers

pytest.importorskip("triton", reason="Triton is not installed")

from rollout_engine import exact  # noqa: E402
from rollout_engine.kernels.cpu import turns  # noqa: E402
from rollout_engine.testing import tiny_model  # noqa: E402
from rollout_engine.testing.architectures import SIZES  # noqa: E402
from tests.models import results, trial  # noqa: E402
from tests.models.results import COLUMNS, outcome_of  # noqa: E402

ROWS = results.read()
PARTS = [part for part in COLUMNS if part != "device" or not torch.cuda.is_available()]
"""Without a device: its kernels are not in the interpreter then."""
WHOLE = ["qwen3", "mixtral", "dots1", "gemma2", "gpt2", "bart", "qwen3_vl", "paligemma"]
"""Tried by all parts: one call and modules, a mixture, types that are refused, composites."""
OTHERS = [
    name for name, row in ROWS.items() if row["sizes"] == "generic" and outcome_of(row["float32"]) in results.SERVED
]
"""That no other test compares with a trainer."""

pytestmark = [
    pytest.mark.filterwarnings("default"),  # transformers' own, about sizes that no real checkpoint has
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
]
same_release = pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in {row["made_with"].partition(",")[0] for row in ROWS.values()},
    reason="the rows are of another release",
)


@pytest.fixture(scope="module")
def tried():
    with trial.tried() as found:
        yield found


def outcomes(row, parts):
    """The outcomes of parts, without their reasons; what bfloat16 is may depend on the machine for gpt_neox."""
    return {column: outcome_of(row[column]) for part in parts for column in COLUMNS[part] if column in row}


@same_release
def test_a_type_has_its_row(tried, tmp_path):
    parts = ["bits", "gradients"]
    row = tried.try_type("qwen3", tmp_path, ROWS["qwen3"], parts)
    assert outcomes(row, COLUMNS) == outcomes(ROWS["qwen3"], COLUMNS)
    assert outcomes(row, parts) == {"float32": "exact", "bfloat16": "exact", "layers": "one call", "gradients": "equal"}


@pytest.mark.slow
@same_release
@pytest.mark.parametrize("name", WHOLE)
def test_every_part_of_a_type_has_its_row(tried, tmp_path, name):
    assert outcomes(tried.try_type(name, tmp_path, parts=PARTS), PARTS) == outcomes(ROWS[name], PARTS)


@pytest.mark.slow
@same_release
@pytest.mark.parametrize("name", OTHERS)
def test_a_type_of_the_generic_recipe_has_its_row(tried, tmp_path, name):
    parts = ["bits", "gradients"]
    assert outcomes(tried.try_type(name, tmp_path, parts=parts), parts) == outcomes(ROWS[name], parts)


def test_a_trainer_with_other_weights_is_a_fault(tried, tmp_path, monkeypatch):
    def load_other(path, dtype):
        return exact.enable(tiny_model("llama", seed=1, dtype=dtype, **SIZES["llama"]).requires_grad_(True))

    monkeypatch.setattr(trial.exact, "load", load_other)
    row = tried.try_type("llama", tmp_path, parts=["bits"])
    assert row["float32"].startswith("wrong: ") and "differ from the trainer's" in row["float32"]
    assert trial.compare_gradients(tmp_path / "0").startswith("differ: ")


def test_an_error_in_one_part_is_noted_and_the_others_are_tried(tried, tmp_path, monkeypatch):
    def fail(path):
        raise RuntimeError(f"{path} has no gradients")

    monkeypatch.setattr(trial, "compare_gradients", fail)
    row = tried.try_type("llama", tmp_path, parts=["bits", "gradients"])
    assert row["float32"] == "exact"
    assert row["gradients"] == "wrong: RuntimeError: the checkpoint has no gradients"
