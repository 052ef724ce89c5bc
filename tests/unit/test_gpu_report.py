"""One report of all that a machine with a GPU can tell, whatever becomes of its parts."""

import sys

from tests import gpu_report
from tests.gpu_report import PARTS, ROOT, Part


def part(code, seconds=60.0, **environment):
    return Part((sys.executable, "-c", code), seconds, environment)


def test_every_part_has_its_line_and_its_last_lines_whatever_became_of_the_others(tmp_path, capsys):
    parts = {
        "fails": part("print('before'); raise SystemExit(3)"),
        "hangs": part("import time; print('hung', flush=True); time.sleep(600)", seconds=1.0),
        "absent": Part(("no-such-tool",), 60.0),
        "talks": part("import os; print(*range(1000), os.environ['TOLD'], sep='\\n')", TOLD="yes"),
    }
    path = tmp_path / "report.md"
    results = gpu_report.report(parts, path)
    text = path.read_text()
    assert [result.status for result in results.values()] == [
        "failed (exit status 3)",
        "timed out after 1 s",
        "not run: no no-such-tool",
        "passed",
    ]
    assert all(f"| {name} | {result.status} |" in text for name, result in results.items())
    assert all(line in text.splitlines() for line in ("before", "hung", "999", "yes")) and "\n500\n" not in text
    assert "talks: passed" in capsys.readouterr().out


def test_what_a_part_runs_is_there():
    files = [word for each in PARTS.values() for word in each.command if word.startswith("tests/")]
    assert files and all((ROOT / name).exists() for name in files)
