"""The newest committed figures of this machine's class keep the floors; and the scripts that make them run.

`floors.json` holds what was reached, less the noise of a busy machine; an "aim" beside a floor is not reached yet, and
"on" has other floors for a class of machines.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.results import machine_class

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FLOORS = json.loads((HERE / "floors.json").read_text())


@pytest.fixture(scope="module")
def newest():
    """Figure -> values, the latest day's where several days have it."""
    files = sorted((HERE / "results" / machine_class()).glob("*.json"))
    if not files:
        pytest.skip(f"no results of {machine_class()} are committed: run make bench on a quiet machine")
    figures = {}
    for path in files:
        figures |= json.loads(path.read_text())["figures"]
    return figures


@pytest.mark.parametrize(("figure", "value"), [(figure, value) for figure in FLOORS for value in FLOORS[figure]])
def test_committed_figures_keep_the_floors(figure, value, newest):
    if figure not in newest:
        pytest.skip(f"{figure} was never measured on {machine_class()}: run make bench")
    if value not in newest[figure]:
        pytest.skip(f"the newest run of {figure} did not measure {value}: {newest[figure]['command']}")
    everywhere = FLOORS[figure][value]
    bounds = everywhere | everywhere.get("on", {}).get(machine_class(), {})
    assert bounds.get("at_least", float("-inf")) <= newest[figure][value] <= bounds.get("at_most", float("inf"))


def test_a_run_without_peers_saves_its_figures(tmp_path):
    command = [sys.executable, str(HERE / "run.py"), "S", "--peers", "", "--rounds", "1", "--results", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    subprocess.run(command, check=True, env=environment, timeout=200)
    saved = json.loads(next(tmp_path.glob(f"{machine_class()}/*.json")).read_text())
    figure = saved["figures"]["S 8x8, 64+128"]
    assert figure["tokens_per_second"]["ours"] > 0 and figure["share_of_gemm"] > 0
    assert saved["machine"]["cpu"] and saved["versions"]["torch"]


def test_host_time_is_measured_without_a_model():
    command = [sys.executable, str(HERE / "host.py"), "--requests", "2", "--rounds", "1"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    found = subprocess.run(command, check=True, env=environment, timeout=100, capture_output=True, text=True).stdout
    assert ast.literal_eval(found)["median_milliseconds"] > 0
