"""The picture of the demo is drawn from its recording, and loads nothing."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "docs/tools/record_terminal.py"


@pytest.fixture
def recorder():
    pytest.importorskip("rich")
    return runpy.run_path(str(TOOL))["main"]


def test_the_committed_picture_is_drawn_from_the_committed_recording(recorder, tmp_path):
    recorder(["draw", str(ROOT / "docs/images/demo.cast"), str(tmp_path / "demo.svg")])
    drawn = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs/images/demo.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' )]+", drawn)) == {"http://www.w3.org/2000/svg"}


def test_a_command_is_recorded_with_its_times_and_drawn_line_by_line(recorder, tmp_path):
    cast = tmp_path / "a.cast"
    program = "print('one <&>', flush=True); print('\\rtwo\\rthree'); print('\\x1b[31mred\\x1b[0m')"
    recorder(["record", str(cast), "--", sys.executable, "-c", program])
    header, *events = map(json.loads, cast.read_text().splitlines())
    assert header["version"] == 2 and [kind for _, kind, _ in events] == ["o"] * len(events)
    recorder(["draw", str(cast), str(tmp_path / "a.svg"), "--rows", "3"])
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ">one &lt;&amp;&gt;<" in drawn and ">three<" in drawn and ">red<" in drawn and ">two<" not in drawn
    assert "@keyframes scroll" in drawn  # four lines in a window of three


def test_a_command_that_fails_is_not_drawn(recorder, tmp_path):
    with pytest.raises(SystemExit, match="ended with status 3"):
        recorder(["record", str(tmp_path / "a.cast"), "--", sys.executable, "-c", "raise SystemExit(3)"])
