"""Evaluates tasks x sampling settings x checkpoints, as a sweep file says, and writes a report.

    rollout-engine eval sweep.toml
    rollout-engine eval sweep.toml num_samples=4 engine.dtype=float32 --json

`examples/sweep.toml` has every key. What the directory `out` has is not sampled again: after a kill the command goes
on. Beside samples.jsonl it gets table.jsonl (estimates and differences), report.html, and with the extra [eval]
samples.parquet.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from rollout_engine.cli.terminal import announce, sampling
from rollout_engine.rollouts.evaluation.sweep_file import read_sweep_file
from rollout_engine.rollouts.policy import RolloutPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `eval`."""
    parser.add_argument("file", type=Path, help="a sweep file, as examples/sweep.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys that differ from the file, as engine.num_threads=2"
    )
    parser.add_argument("--no-resume", action="store_true", help="begin anew; what `out` has is lost")
    parser.add_argument("--json", action="store_true", help="print estimates and differences as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, write the files, and print the estimates and differences."""
    file = read_sweep_file(arguments.file, arguments.overrides)
    sys.path.insert(0, str(arguments.file.parent.resolve()))  # functions that the file names
    file.check()
    with file.locate_errors():
        with announce(f"loading {file.model}"):
            policy = RolloutPolicy.from_pretrained(file.model, **file.engine)
        with policy, sampling(len(file.arguments["tasks"]), "task") as shown:
            report = policy.evaluate(**file.arguments, resume=not arguments.no_resume, use_tqdm=shown)
    out = Path(file.arguments["out"])
    report.to_jsonl(out / "table.jsonl")
    report.to_html(out / "report.html")
    if find_spec("pyarrow") is not None:
        report.to_parquet(out / "samples.parquet")
    if arguments.json:
        print(json.dumps({"table": report.table, "differences": report.differences}, ensure_ascii=False))
    else:
        print(report)
        print(f"{len(report.samples)} samples in {out}; open {out / 'report.html'} in a browser")
