"""Pages that are made from the code, or speak of it, agree with it."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import rollout_engine
from rollout_engine import EngineConfig, PoolingParams, SamplingParams, SpeculationConfig
from rollout_engine.cli.main import COMMANDS
from rollout_engine.serve.options import ServeOptions

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TOOLS = ("api", "dashboard", "drawings", "figures", "metric_tables", "options")
RESULTS = ROOT / "tests/benchmarks/results"


@pytest.fixture(scope="module")
def tools():
    """The modules of docs/tools that make text or files."""
    sys.path.insert(0, str(DOCS / "tools"))
    try:
        yield {name: importlib.import_module(name) for name in TOOLS}
    finally:
        sys.path.remove(str(DOCS / "tools"))


@pytest.fixture(scope="module")
def series(tools):
    return tools["metric_tables"].series()


def names_of(text):
    return set(re.findall(r"\brollout_engine_[a-z_]+[a-z]\b", text))


def test_the_dashboard_is_what_its_script_writes_and_asks_for_metrics_that_exist(tools, series):
    committed = json.loads((DOCS / "dashboards/grafana.json").read_text(encoding="utf-8"))
    assert committed == tools["dashboard"].dashboard()
    panels = [panel for panel in committed["panels"] if panel["type"] != "row"]
    asked = names_of(" ".join(target["expr"] for panel in panels for target in panel["targets"]))
    assert len(panels) > 20 and len(asked) > 20
    assert not asked - series
    assert names_of(json.dumps(committed["templating"])) <= series


def test_panels_do_not_lie_over_one_another(tools):
    taken = set()
    for panel in tools["dashboard"].dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("page", ["metrics.md", "statistics.md", "versions.md", "fleet.md"])
def test_metrics_that_a_page_names_exist(series, page):
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in series} | {"rollout_engine_replica"}
    asked = names_of((DOCS / page).read_text(encoding="utf-8").replace("rollout_engine_replica_`", ""))
    assert not {name for name in asked if name not in series | families and not name.endswith("_jsonl")}


def test_every_metric_has_a_row(tools, series):
    rows = set(re.findall(r"^\| `(\w+)` \|", tools["metric_tables"].markdown(), re.MULTILINE))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in series} == rows


def test_every_option_has_a_row_with_its_meaning_and_every_command_its_help(tools):
    text = tools["options"].markdown()
    for cls in (EngineConfig, SamplingParams, PoolingParams, SpeculationConfig, ServeOptions):
        for name in cls.__struct_fields__:
            row = re.search(rf"^\| `{name}` \| [^|]+ \| [^|]+ \| \S", text.replace("\\|", "/"), re.MULTILINE)
            assert row, f"{cls.__name__}.{name} has no docstring"
    assert not [name for name in COMMANDS if f"usage: rollout-engine {name}" not in text]
    assert "| `max_num_seqs` | int, 1 to 2<sup>20</sup> | `256` |" in text
    assert "| `seed` | int, 0 to 2<sup>63</sup> - 1 | `0` |" in text
    assert "| `step_deadline` | number, above 0 or None | `1800.0` |" in text


def test_no_class_of_options_is_left_out(tools):
    defined = re.compile(r"^class (\w+)\((?:UserStruct|Table)\b", re.MULTILINE)
    found = {name for path in ROOT.glob("rollout_engine/**/*.py") for name in defined.findall(path.read_text("utf-8"))}
    options = tools["options"]
    shown = {cls.__name__ for _, _, cls in options.SECTIONS} | {cls.__name__ for _, cls in options._fleet_tables()}
    assert found - shown <= {"Table", "FleetFile"} and len(shown) > 10


def test_every_public_name_and_every_verb_is_in_the_reference(tools):
    text = tools["api"].markdown()
    assert not [name for name in rollout_engine._HOMES if text.count(f"::: rollout_engine.{name}\n") != 1]
    assert "::: rollout_engine.engine.verbs.lifecycle.pause_generation\n" in text


def test_the_committed_drawings_are_what_the_script_draws(tools):
    for name, draw in tools["drawings"].DRAWINGS.items():
        drawn = str(draw())
        assert drawn == (DOCS / f"images/{name}.svg").read_text(encoding="utf-8"), name
        assert set(re.findall(r"https?://[^\"' )<]+", drawn)) == {"http://www.w3.org/2000/svg"}


def committed_figures():
    found = {}
    for path in sorted(RESULTS.glob("*avx512*/*.json"), key=lambda path: path.stem):
        found |= json.loads(path.read_text(encoding="utf-8"))["figures"]
    return found


def rounded(text):
    """A number of a table and half of its last digit."""
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return pytest.approx(float(plain), abs=0.5 * 10**-decimals * 1.001)


def test_the_figures_of_the_performance_page_are_committed_ones(tools):
    text, figures = (DOCS / "performance.md").read_text(encoding="utf-8"), committed_figures()
    speeds = re.findall(r"^\| ([SML] \d+x\d+, \S+) \| ([\d,.]+) \| ([\d,.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(speeds) == 5
    for work, ours, theirs, ratio in speeds:
        figure = figures[work]
        assert figure["tokens_per_second"]["ours"] == rounded(ours)
        assert figure["tokens_per_second"]["vllm"] == rounded(theirs)
        assert figure["ratio_to_vllm"] == rounded(ratio)
    steps = re.findall(
        r"^\| (\w, \w+) \| ([\d,]+) ms \| ([\d,]+) ms \(([\d.]+) x\) \| ([\d,]+) ms \(([\d.]+) x\)", text, re.MULTILINE
    )
    assert len(steps) == 3
    for step, plain, exact, ratio, packed, packed_ratio in steps:
        figure = figures[f"training step, {step}"]
        assert list(figure["step_ms"].values()) == [rounded(plain), rounded(exact), rounded(packed)]
        assert [figure["step_ratio"], figure["packed_step_ratio"]] == [rounded(ratio), rounded(packed_ratio)]
    costs = re.findall(r"^\| ([^|]+) \| (-?[\d.]+) % \|", text, re.MULTILINE)
    assert len(costs) == 3
    for what, share in costs:
        assert 100 * figures[what]["cost"] == rounded(share)
    assert text.count("<!-- generated: figures -->") == 1
    assert not [name for name in figures if f"| {name} |" not in tools["figures"].markdown()]


def test_slow_figures_are_those_of_their_day():
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    folders = {"AVX-512": "amd-epyc-avx512_bf16-2", "AVX2": "amd-epyc-avx2-2", "H200": "nvidia-h200"}
    row = r"^\| `([^`]+)` \| `([^`]+)`[^|]* \| ([\d.,]+) \| ([\w-]+) \| (2026-[\d-]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == len(re.findall(r" \| 2026-[\d-]+ \|$", text, re.MULTILINE)) > 20
    for name, path, value, machine, day in rows:
        found = json.loads((RESULTS / folders[machine] / f"{day}.json").read_text(encoding="utf-8"))["figures"][name]
        for key in path.split("."):
            found = found[key]
        assert found == rounded(value), (name, path)


def test_the_figures_of_int8_are_committed_ones():
    text, figures = (DOCS / "exactness.md").read_text(encoding="utf-8"), committed_figures()
    rates = re.findall(r"^\| (1|8|64) " + r"\| ([\d.]+) " * 6 + r"\|$", text, re.MULTILINE)
    assert len(rates) == 3
    for num, *columns in rates:
        figure = figures[f"int8 / exact, M, {num} sequence{'' if num == '1' else 's'}"]
        for dtype, (exact, int8, ratio) in {"float32": columns[:3], "bfloat16": columns[3:]}.items():
            assert figure[f"{dtype} exact, tokens per CPU second"] == rounded(exact)
            assert figure[f"{dtype} int8, tokens per CPU second"] == rounded(int8)
            assert figure[f"{dtype} int8 / exact"] == rounded(ratio)
    costs = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) MB \| ([\d.]+) MB \|$", text, re.MULTILINE)
    assert len(costs) == 2
    for dtype, largest, mean, weights, codes in costs:
        apart, memory = figures[f"int8, log-probs, M, {dtype}"], figures[f"int8, megabytes, M, {dtype}"]
        assert [apart["largest"], apart["mean"]] == [rounded(largest), rounded(mean)]
        assert [memory["weights"], memory["codes"]] == [rounded(weights), rounded(codes)]
