"""The report: its page holds everything, and nothing of a rollout becomes markup."""

import json
import re

import pytest

from rollout_engine.looking.page import write_page
from rollout_engine.rollouts.evaluation.report import EvalReport
from tests.unit.looking.lines import HOSTILE, rollouts
from tests.unit.rollouts.evaluation.lines import CHECKPOINTS, PLAN, evaluated


@pytest.fixture
def page_of(tmp_path):
    def write(report):
        report.to_html(tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def data_of(text):
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_the_page_holds_samples_tables_and_checkpoints(page_of):
    report = EvalReport(PLAN, evaluated(3))
    data = data_of(page_of(report))
    assert data["report"]["checkpoints"] == list(CHECKPOINTS)
    assert data["report"]["table"] == report.table and data["report"]["differences"] == report.differences
    assert [s["evaluation"] for s in data["samples"]] == [s["evaluation"] for s in report.samples]
    assert len(data["samples"]) == 3 * 2 * 2 * 3 * 4


def test_groups_of_different_cells_are_different_groups(page_of):
    data = data_of(page_of(EvalReport(PLAN, evaluated(1, 1))))
    assert len({s["where"] for s in data["samples"]}) == 12


def test_hostile_names_and_texts_stay_data(page_of):
    plan = PLAN | {"checkpoints": {HOSTILE: {}}}
    samples = evaluated(1)
    for sample in samples:
        sample |= {"response": HOSTILE, "evaluation": sample["evaluation"] | {"checkpoint": HOSTILE, "answer": HOSTILE}}
    text = page_of(EvalReport(plan, samples))
    start = text.index('id="data">') + len('id="data">')
    assert "<" not in text[start : text.index("</script>", start)]
    assert text.count("</script>") == 2 and "default-src 'none'" in text
    assert data_of(text)["report"]["checkpoints"] == [HOSTILE]


def test_samples_come_in_the_order_of_the_sweep(page_of):
    samples = evaluated(2)
    assert EvalReport(PLAN, samples[::-1]).samples == EvalReport(PLAN, samples).samples == samples


def test_prompts_with_too_few_samples_have_no_pass_at_k():
    samples = [s for s in evaluated(3) if not (s["group_id"] == 0 and s["sample_index"] == 3)]
    report = EvalReport(PLAN, samples)
    counts = {(row["metric"], row["num_prompts"]) for row in report.table}
    assert {("pass@1", 3), ("pass@4", 2), ("maj@4", 2), ("mean", 3)} <= counts


def test_failed_episodes_have_a_metric_of_their_own_and_are_in_no_other():
    samples = [sample | {"error": None} for sample in evaluated(3)]
    for sample in samples:
        if sample["group_id"] == 0 or (sample["group_id"] == 1 and sample["sample_index"] == 2):
            sample |= {"error": "the sandbox is down", "reward": -100.0}
    report = EvalReport(PLAN, samples)
    rows = {row["metric"]: row for row in report.table if row["checkpoint"] == CHECKPOINTS[0]}
    assert rows["failed"]["value"] == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert (rows["failed"]["num_prompts"], rows["failed"]["num_samples"]) == (3, 12)
    assert (rows["mean"]["num_prompts"], rows["mean"]["num_samples"]) == (2, 7) and rows["mean"]["low"] >= 0
    assert (rows["pass@1"]["num_prompts"], rows["pass@4"]["num_prompts"]) == (2, 1)


def test_a_line_for_each_cell_and_each_difference_is_printed():
    report = EvalReport(PLAN, evaluated(3))
    cells, differences = (part.splitlines() for part in str(report).split("\n\n"))
    metrics = ["mean", "pass@1", "pass@4", "maj@1", "maj@4", "length", "truncated"]
    assert cells[0].split() == ["checkpoint", "task", "setting", *metrics]
    assert len(cells) == 1 + 12 and re.search(r"0\.\d+ \[\d", cells[1])
    assert differences[0].split() == ["checkpoint", "baseline", "task", "setting", *metrics]
    assert len(differences) == 1 + 12 and differences[1].split()[:4] == ["steps/200", "steps/100", "spell", "cool"]
    row = report.differences[0]
    assert f"  {row['value']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}]" in differences[1]
    one = [sample for sample in evaluated(3) if sample["evaluation"]["checkpoint"] == "steps/100"]
    assert "baseline" not in str(EvalReport(PLAN, one))


def test_a_page_of_rollouts_alone_has_no_report(tmp_path):
    write_page(rollouts(1, 1), tmp_path / "page.html", title="t")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "__REPORT__" not in text and "function chart" not in text
