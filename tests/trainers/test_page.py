"""The code of docs/trainers.md runs as printed."""

from pathlib import Path

import pytest

from tests.test_readme import run

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("package", ["trl", "torchrl"])
def test_the_code_for_a_trainer_runs(package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run(PAGE, package)
