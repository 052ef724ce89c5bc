"""Simulates a fleet from what its steps cost: throughput, latency, staleness, failures, before anybody buys it.

    rollout-engine simulate fleet.toml
    rollout-engine simulate fleet.toml fleet.num_replicas=1000 'compare.fleet.balancer=["requests", "round-robin"]'
    rollout-engine simulate fleet.toml --json --plot fleet.png
    rollout-engine simulate --measure Qwen/Qwen3-0.6B --out costs.toml dtype=bfloat16

`examples/fleet.toml` has every key with its meaning. A file's table [compare] gives several values to some keys: each
combination is a row. `--measure` runs a model on this machine at several batch sizes and writes the tables [engine] and
[costs]; a fleet file takes over the costs by `costs.file`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from rollout_engine.base.errors import ConfigError
from rollout_engine.capacity.fleet_file import Case, read_cases, with_costs
from rollout_engine.capacity.options import CostsTable
from rollout_engine.capacity.outcome import Outcome, table
from rollout_engine.capacity.plot import check_plot, draw
from rollout_engine.capacity.simulation import Simulation
from rollout_engine.cli import measured_costs
from rollout_engine.cli.out_file import check_out, write_out
from rollout_engine.cli.overrides import parse_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `simulate`."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="fleet.toml table.key=value",
        help="the fleet file, and keys that differ from it; without a file the defaults. With --measure: fields of "
        "EngineConfig, as dtype=bfloat16",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw to a .png or .svg (needs the extra examples)")
    parser.add_argument("--measure", metavar="MODEL", help="measure the costs of this checkpoint's steps instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for what --measure finds; printed without it")


def run(arguments: argparse.Namespace) -> None:
    """Measure costs, or simulate every case and print its outcome."""
    if arguments.measure is not None:
        _measure(arguments)
        return
    if arguments.out is not None:
        raise ConfigError("--out is for --measure; the figures of a simulation go to standard output, by --json.")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    files = [argument for argument in arguments.arguments if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(f"{' '.join(files)}: give one fleet file, and the rest as table.key=value.")
    path = Path(files[0]) if files else None
    cases = read_cases(path, [argument for argument in arguments.arguments if "=" in argument])
    outcomes = _simulate(_with_measured_costs(cases), arguments.plot)
    if arguments.json:
        print(json.dumps(_as_json(outcomes), indent=1))
    else:
        print(table([(case.settings, outcome) for case, outcome in outcomes]))
        wall, events = (sum(getattr(o, name) for _, o in outcomes) for name in ("wall_seconds", "num_events"))
        print(f"{sum(o.num_tokens for _, o in outcomes):,} tokens, {events:,} events simulated in {wall:.1f} s")


def _simulate(cases: list[Case], plot: Path | None) -> list[tuple[Case, Outcome]]:
    outcomes, curves = [], []
    num_samples = sum(_num_samples(case) for case in cases)
    with _progress("simulate", num_samples, "sample") as bar:
        for case in cases:
            simulation = Simulation(case.file, bar.update)
            outcomes.append((case, simulation.run()))
            if plot is not None:
                seconds = [job.ended_at - job.submitted_at for job in simulation.workload.jobs]
                curves.append((_label(case.settings), simulation.fleet.timeline, seconds))
    if plot is not None:
        draw(plot, curves)
    return outcomes


def _with_measured_costs(cases: list[Case]) -> list[Case]:
    """The same cases with the costs of the checkpoint that [costs] names, measured now."""
    model = cases[0].file.costs.measure
    if not model:
        return cases
    found = _measure_costs(model, {}).fit.costs
    return [with_costs(case, CostsTable(**found._asdict())) for case in cases]


def _measure(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        raise ConfigError("--plot is for a simulation: measure first, then simulate.")
    overrides = parse_overrides(arguments.arguments)
    if overrides.sampling:
        names = ", ".join(overrides.sampling)
        raise ConfigError(f"{names}: --measure samples by itself; give fields of EngineConfig.")
    if arguments.out is not None:
        check_out(arguments.out, "costs.toml")
    measured = _measure_costs(arguments.measure, overrides.engine)
    if arguments.out is not None:
        write_out(arguments.out, measured_costs.as_toml(measured))
    if arguments.json:
        print(json.dumps({"model": measured.model, "engine": measured.engine, **_fit_as_json(measured)}, indent=1))
    elif arguments.out is None:
        print(measured_costs.as_toml(measured), end="")


def _measure_costs(model: str, options: dict[str, Any]) -> measured_costs.Measured:
    with _progress("measure", None, "work") as bar:
        return measured_costs.measure(model, options, bar.update)


def _fit_as_json(measured: measured_costs.Measured) -> dict[str, Any]:
    return {"costs": measured.fit.costs._asdict(), **{k: v for k, v in measured.fit._asdict().items() if k != "costs"}}


def _as_json(outcomes: list[tuple[Case, Outcome]]) -> dict[str, Any]:
    return {
        "cases": [
            {"settings": case.settings, "outcome": msgspec.to_builtins(outcome), "file": msgspec.to_builtins(case.file)}
            for case, outcome in outcomes
        ]
    }


def _num_samples(case: Case) -> int:
    workload = case.file.workload
    return workload.num_batches * workload.prompts_per_batch * workload.samples_per_prompt


def _label(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())


def _progress(title: str, total: int | None, unit: str) -> Any:
    return tqdm(desc=title, total=total, unit=unit, unit_scale=True, delay=2, disable=not sys.stderr.isatty())
