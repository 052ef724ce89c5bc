"""Fleet files and the command: what is read, printed, and refused."""

import json
import sys
from pathlib import Path

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.capacity.costs import StepCosts, StepShape, fit
from rollout_engine.capacity.fleet_file import TABLES, read_cases
from rollout_engine.cli import measured_costs
from rollout_engine.cli.main import main
from rollout_engine.testing import tiny_checkpoint

EXAMPLE = Path(__file__).parents[3] / "examples" / "fleet.toml"
QUICK = ("fleet.num_replicas=2", "workload.num_batches=1", "workload.prompts_per_batch=4", "failures.mtbf_hours=0")


def test_the_example_names_every_key():
    text = EXAMPLE.read_text(encoding="utf-8")
    read_cases(EXAMPLE, [])
    for name, table in TABLES.items():
        assert f"[{name}]" in text
        assert not [key for key in table.__struct_fields__ if f"{key} = " not in text and f".{key}]" not in text]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("flet.num_replicas=4", "Unknown table 'flet'. Did you mean 'fleet'?"),
        ("fleet.num_replica=4", "Unknown key of [fleet] 'num_replica'. Did you mean 'num_replicas'?"),
        ("engine.num_replicas=4", "'num_replicas' belongs to [fleet], not to [engine]."),
        ("fleet.num_replicas=0", "[fleet]: num_replicas=0 is not allowed: must be an int >= 1."),
        ("fleet.balancer=request", "Did you mean 'requests'?"),
        ("workload.output_tokens.p95=3", "[workload.output_tokens]: p95=3.0 is not allowed"),
        ("workload.output_tokens=3", "must be a table"),
        ("workload.samples_per_request=3", "a divisor of samples_per_prompt=8"),
        ("engine.num_kv_blocks=8", "raise num_kv_blocks"),
        ("workload.shared_prefix_tokens=8", "the shortest prompt"),
        ("compare.fleet.balancer=requests", "a list of the values to compare"),
        ("fleet=4", "write table.key=value"),
        ("costs.file=nowhere.toml", "nowhere.toml cannot be read"),
        ('compare.costs.file=["a", "b"]', "costs come from one place"),
        ("seed=-1", "an int of at least 0"),
    ],
)
def test_mistakes_are_refused(option, says):
    with pytest.raises(ConfigError) as refused:
        read_cases(None, [option])
    assert says in str(refused.value)


def test_every_combination_of_compared_values_is_a_case():
    cases = read_cases(
        None,
        ['compare.fleet.balancer=["requests", ["prefix-aware", "requests"]]', "compare.engine.max_num_seqs=[8, 16]"],
    )
    found = [(case.file.fleet.balancer, case.file.engine.max_num_seqs) for case in cases]
    assert found == [
        (("requests",), 8),
        (("requests",), 16),
        (("prefix-aware", "requests"), 8),
        (("prefix-aware", "requests"), 16),
    ]
    with pytest.raises(ConfigError, match="100 cases, more than 64"):
        read_cases(None, [f"compare.fleet.num_replicas={[*range(1, 101)]}"])


def test_costs_of_another_file_are_taken_over(tmp_path):
    found = measured_costs.Measured(fit(*_steps(StepCosts(1e-3, 2e-5, 3e-6, 4e-9))), [], {"max_num_seqs": 7}, "a model")
    (tmp_path / "costs.toml").write_text(measured_costs.as_toml(found), encoding="utf-8")
    (tmp_path / "fleet.toml").write_text('[costs]\nfile = "costs.toml"\n')
    assert read_cases(tmp_path / "fleet.toml", [])[0].file.costs.costs == pytest.approx((1e-3, 2e-5, 3e-6, 4e-9))
    given = read_cases(EXAMPLE, [f"costs.file={tmp_path / 'costs.toml'}", "compare.costs.row_seconds=[0, 1]"])
    assert [case.file.costs.row_seconds for case in given] == [0, 1]
    assert given[0].file.costs.step_seconds == pytest.approx(1e-3)


def test_costs_come_from_one_place(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text('[costs]\nfile = "costs.toml"\nstep_seconds = 1.0\n')
    with pytest.raises(ConfigError, match="has step_seconds and takes its numbers from costs.toml: give one of them"):
        read_cases(path, [])
    with pytest.raises(ConfigError, match="is not possible with costs.measure"):
        read_cases(None, ["costs.measure=tiny", "compare.costs.row_seconds=[0, 1]"])


def test_a_fit_finds_costs_and_none_below_0():
    costs = StepCosts(1e-3, 2e-5, 0.0, 4e-9)
    shapes, seconds = _steps(costs)
    found = fit(shapes, seconds)
    assert found.costs == pytest.approx(costs, abs=1e-12) and found.p95_error < 1e-6
    falling = fit(shapes, [1.0 / (1 + shape.num_rows) for shape in shapes])
    assert min(falling.costs) >= 0 and falling.p95_error > 0.1
    with pytest.raises(ConfigError, match="3 measured steps are too few"):
        fit(shapes[:3], seconds[:3])


def test_steps_of_a_real_engine_are_measured(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path, max_position_embeddings=64)
    measured = measured_costs.measure(str(checkpoint), dict(max_num_seqs=2, num_kv_blocks=64, num_threads=1))
    assert sum(measured.fit.costs) > 0 and measured.engine["num_kv_blocks"] == 64
    works = measured_costs.works(2, 64, 64 * 16)
    sampled = 2 * sum(work.num_rows * 24 for work in works)
    prefilled = 2 * sum(work.num_prompts * work.num_prompt_tokens for work in works)
    assert sum(shape.num_prefill_tokens for shape, _ in measured.steps) == prefilled
    assert sum(shape.num_rows for shape, _ in measured.steps) == sampled - 2 * sum(work.num_rows for work in works)


def test_the_command_prints_a_table_or_json(capsys):
    assert main(["simulate", str(EXAMPLE), *QUICK, "compare.engine.max_num_seqs=[8, 16]"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["engine.max_num_seqs", "tokens/s"] and len(table) == 4
    assert main(["simulate", str(EXAMPLE), *QUICK, "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["outcome"]["tokens_per_second"] > 0 and case["file"]["fleet"]["num_replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "fleet.pdf"], "a file named *.png or *.svg"),
        (["--plot", "nowhere/fleet.png"], "there is no folder nowhere"),
        (["--out", "costs.toml"], "--out is for --measure"),
        (["a.toml", "b.toml"], "give one fleet file"),
        (["--measure", "tiny", "n=4"], "--measure samples by itself"),
    ],
)
def test_mistakes_of_the_command_end_in_one_line(arguments, says, capsys):
    assert main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_without_matplotlib_a_plot_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "--plot", "fleet.png"]) == 2
    assert "rollout-engine[examples]" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plot_is_drawn(tmp_path):
    for kind in ("png", "svg"):
        path = tmp_path / f"fleet.{kind}"
        assert main(["simulate", *QUICK, "compare.engine.max_num_seqs=[8, 16]", "--plot", str(path)]) == 0
        assert path.stat().st_size > 1000


def _steps(costs):
    shapes = [
        StepShape(rows, prefill, context * max(rows, 1))
        for rows in (0, 1, 8, 64)
        for prefill in (1, 100, 1000)
        for context in (10, 500)
    ]
    return shapes, [costs.seconds(shape) for shape in shapes]
