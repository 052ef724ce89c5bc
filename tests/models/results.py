"""What `python -m tests.models` has found: results.json, a line for each type.

A row has these columns, each an outcome or "outcome: reason":

    kind        type | composite
    sizes       own (rollout_engine/testing/architectures.py, tests/integration/composites.py)
                | generic (tests/models/recipe.py)
    made_with   versions and machine
    float32     exact | round-off | refused | untried
    bfloat16    exact | round-off | refused
    layers      one call | modules
    gradients   equal | differ
    ranks       equal | refused
    device      exact | round-off | modules

"wrong" in any column is a fault. Only rows that are exact in float32 have columns from `gradients` on, and only types.
"""

import json
import os
from pathlib import Path

FILE = Path(__file__).with_name("results.json")
COLUMNS = {
    "bits": ("float32", "bfloat16", "layers"),
    "gradients": ("gradients",),
    "ranks": ("ranks",),
    "device": ("device",),
}
"""Part of a trial -> the columns that it fills."""
SERVED = ("exact", "round-off")

Row = dict[str, str]


def read(path: Path = FILE) -> dict[str, Row]:
    """Rows by type; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(results: dict[str, Row], path: Path = FILE) -> None:
    """Write all rows, in the order of their names; a reader finds the old file or the new one."""
    lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results)]
    beside = path.with_suffix(".new")
    beside.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(beside, path)


def outcome_of(found: str) -> str:
    """The outcome without its reason: "refused" of "refused: it is an encoder-decoder"."""
    return found.partition(": ")[0]


def reason_of(found: str) -> str:
    """The reason alone, without the name of the class and without its full stop; "" if there is none."""
    reason = found.partition(": ")[2]
    for mark in ("cannot be served exactly: ", "cannot be exact: ", "cannot be cut, because "):
        reason = reason.partition(mark)[2] or reason
    return reason.rstrip(".")


def has_all_parts(row: Row) -> bool:
    """Whether all parts are tried of this row: it is an exact type."""
    return row["kind"] == "type" and row.get("float32") == "exact"


def missing_parts(row: Row) -> list[str]:
    """The parts of a trial that a row should have and lacks."""
    if outcome_of(row["float32"]) in ("refused", "untried"):
        return []
    parts = COLUMNS if has_all_parts(row) else ["bits"]
    return [part for part in parts if not row.keys() >= set(COLUMNS[part])]


def names_of(results: dict[str, Row], kind: str, *outcomes: str, column: str = "float32") -> list[str]:
    """Names of this kind with one of these outcomes in a column, sorted."""
    return sorted(
        name
        for name, row in results.items()
        if row["kind"] == kind and outcome_of(row.get(column, "untried")) in outcomes
    )
