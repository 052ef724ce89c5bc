"""The code of docs/trainers.md, and the README's for a trainer, runs as printed."""

from pathlib import Path

import pytest

from tests.test_readme import README, run

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("page", "package"), [(PAGE, "trl"), (PAGE, "torchrl"), (README, "trl")])
def test_the_code_for_a_trainer_runs(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run(page, package)
