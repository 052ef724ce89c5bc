"""Every committed figure with the command that measured it: `markdown()` of speed, or of faults.

python docs/tools/figures.py        prints the page's generated part
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
ASIDE = {"command", "revision", "busy_percent_before", "remark"}
"""Keys of a figure that are not measured, or are about the machine."""


def markdown(folder: str = "benchmarks") -> str:
    """A table for each machine and day, the newest first."""
    parts = []
    for path in sorted(
        (TESTS / folder / "results").glob("*/*.json"), key=lambda path: (path.stem, path.parent.name), reverse=True
    ):
        content = json.loads(path.read_text(encoding="utf-8"))
        parts.append(
            f"### {_machine(content)}, {path.stem}\n\n"
            f"{', '.join(f'{name} {version}' for name, version in content['versions'].items())}.\n\n"
            + "\n".join(_rows(content["figures"]))
        )
    return "\n\n".join(parts) + "\n"


def _machine(content: dict[str, Any]) -> str:
    if "device" in content:
        return str(content["device"])
    machine = content["machine"]
    return f"{machine['cpu']}, {machine['isa'][0].replace('_', ' ')}, {machine['cores']} cores"


def _rows(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| figure | measured | command | revision |"
    yield "|---|---|---|---|"
    for name, figure in sorted(figures.items()):
        measured = ", ".join(f"{key} {_value(value)}" for key, value in figure.items() if _is_shown(key, value))
        yield f"| {name} | {measured} | `{figure['command']}` | {(figure['revision'] or '').rstrip('+')} |"


def _is_shown(key: str, value: object) -> bool:
    if key in ASIDE:
        return False
    return isinstance(value, int | float) or (
        isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_value(each)}" for key, each in value.items()) + ")"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    print(markdown())
