"""The page of rollouts: what it holds, and that no text of a rollout becomes markup. Browsers: tests/browser."""

import json
import re

import pytest

from rollout_engine.cli.main import main
from rollout_engine.looking.page import page_data, write_page
from tests.unit.looking.lines import HOSTILE, rollouts, write_lines


def data_of(path):
    text = path.read_text(encoding="utf-8")
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_a_page_holds_every_sample_with_its_group_and_advantage(tmp_path):
    samples = rollouts(3, 4)
    write_page(samples, tmp_path / "page.html", title="t", token_text=lambda token_id: f"[{token_id}]")
    data = data_of(tmp_path / "page.html")
    assert data["title"] == "t" and len(data["samples"]) == 12
    for given, shown in zip(samples, data["samples"], strict=True):
        mates = [s["reward"] for s in samples if s["group_id"] == given["group_id"]]
        assert shown["advantage"] == pytest.approx(given["reward"] - sum(mates) / len(mates))
        assert data["prompts"][shown["prompt"]] == given["prompt"]
        assert [data["vocabulary"][str(i)] for i in shown["tokens"]] == [f"[{i}]" for i in given["response_token_ids"]]
        assert shown["seed"] == str(given["seed"])


def test_groups_of_a_later_rollout_are_other_groups():
    samples = rollouts(2, 2) + rollouts(2, 2)
    data = page_data(samples, "t", lambda token_id: None)
    assert [s["where"] for s in data["samples"]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rows_of_an_episode_and_of_other_seats_between_them_are_of_their_group():
    of_start = rollouts(1, 2)
    rows = []
    for index, turn, seat in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1)]:
        length = len(of_start[index]["response_token_ids"])
        prompt = {"group_id": seat, "prompt_token_ids": [seat, turn]}
        rows.append(of_start[index] | prompt | {"episode_id": index, "turns": [turn] * length})
    data = page_data(rows * 2, "t", lambda token_id: None)
    assert [s["where"] for s in data["samples"]] == [0, 0, 1, 0, 0, 1, 2, 2, 3, 2, 2, 3]


def test_samples_that_an_evaluation_added_later_are_of_their_group():
    cells = [{"checkpoint": "base", "task": "t", "setting": setting} for setting in ("hot", "cold")]
    first, second = ([sample | {"evaluation": cell} for sample in rollouts(1, 4)] for cell in cells)
    data = page_data([*first[:2], *second[:2], *first[2:], *second[2:]], "t", lambda token_id: None)
    assert [s["where"] for s in data["samples"]] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_hostile_text_stays_data(tmp_path):
    samples = [s | {"prompt": HOSTILE, "response": HOSTILE, "columns": {"c": HOSTILE}} for s in rollouts(1, 1)]
    write_page(samples, tmp_path / "page.html", title=HOSTILE)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    assert "<" not in text[start : text.index("</script>", start)]
    assert text.count("</script>") == 2
    shown = data_of(tmp_path / "page.html")
    assert shown["title"] == shown["samples"][0]["response"] == shown["prompts"][0] == HOSTILE


def test_the_page_may_load_nothing(tmp_path):
    write_page(rollouts(1, 1), tmp_path / "page.html", title="t")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)


def test_the_command_takes_files_and_directories(tmp_path, capsys):
    write_lines(tmp_path / "a" / "rollouts.jsonl", rollouts(2, 2))
    write_lines(tmp_path / "b" / "rollouts-1.jsonl", rollouts(1, 2))
    write_lines(tmp_path / "evaluation" / "samples.jsonl", rollouts(1, 3))
    assert main(["view", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "9 samples of 3 files" in capsys.readouterr().out
    assert len(data_of(tmp_path / "page.html")["samples"]) == 9


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert main(["view", str(tmp_path), "--html", "page.html"]) == 2
    assert "rollouts*.jsonl" in capsys.readouterr().err
    write_lines(tmp_path / "rollouts.jsonl", rollouts(1, 1))
    assert main(["view", str(tmp_path), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--html", "x.html", "--tokenizer", str(tmp_path / "none")]) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert main(["view", str(tmp_path)]) == 2
    assert "is not a terminal" in (said := capsys.readouterr().err) and "--html FILE" in said
    assert said.startswith("rollout-engine view: stdin is not")
    assert main(["view", str(tmp_path / "rollout.jsonl")]) == 2
    said = capsys.readouterr().err
    assert f"Did you mean '{tmp_path / 'rollouts.jsonl'}'?" in said and "terminal" not in said and "?." not in said
