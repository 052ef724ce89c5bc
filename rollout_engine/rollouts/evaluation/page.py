"""The report of an evaluation as one HTML page: curves, tables, and the rollouts, to filter and open."""

import os
from typing import Any, Protocol

from rollout_engine.looking.page import write_page
from rollout_engine.looking.samples import TokenText


class Report(Protocol):
    """The part of an `EvalReport` that the page shows."""

    samples: list[dict[str, Any]]
    table: list[dict[str, Any]]
    differences: list[dict[str, Any]]

    @property
    def checkpoints(self) -> list[str]:
        """Names of checkpoints, in order."""
        ...


def write_report(report: Report, path: str | os.PathLike[str], token_text: TokenText) -> None:
    """Write the page. Texts of rollouts are data of it, never markup or a script."""
    shown = {"checkpoints": report.checkpoints, "table": report.table, "differences": report.differences}
    write_page(report.samples, path, title="Evaluation", token_text=token_text, report=shown)
