"""The fault runs at length: python -m tests.faults.soak [--seconds N] [--count N] [PART ...], from the root.

Every part runs to its count, or for as many seconds, whichever ends first, in a process of its own that is watched.
What is known of it is in results/MACHINE/DATE.json from its start on: its figures, or how it failed and how far it had
come. A failure has its log beside that file, and makes the exit status 1; the other parts still run.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.benchmarks.results import save
from tests.faults.parts import PARTS
from tests.faults.watch import Figure, Limits, watch
from tests.fuzz import http_fuzz

HERE = Path(__file__).parent


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the parts asked for. Returns how many have failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {' '.join(PARTS)}; default: all")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of each part at most; inf: all run to their count"
    )
    parser.add_argument("--count", type=int, help="of each part at most; default: as the part has it")
    parser.add_argument("--hang-seconds", type=float, default=600.0, help="without progress, then a part is ended")
    half = round(psutil.virtual_memory().total / 2**31, 1)
    parser.add_argument("--memory-gib", type=float, default=half, help="of a part and its children at most")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return sum("failure" in _run(name, options) for name in options.parts or PARTS)


def _run(name: str, options: argparse.Namespace) -> Figure:
    limits = f"--seconds {options.seconds:g}" + (f" --count {options.count}" if options.count else "")

    def note(figure: Figure) -> Path:
        return save(options.results, name, figure, {}, f"python -m tests.faults.soak {limits} {name}")

    with tempfile.TemporaryDirectory() as directory:
        count, log = options.count or PARTS[name][1], Path(directory, "log")
        command = [sys.executable, "-m", "tests.faults.parts", name, str(options.seconds), str(count), directory]
        environment = os.environ | (http_fuzz.ENVIRONMENT if name == "http" else {})
        figure = watch(command, log, Limits(options.hang_seconds, options.memory_gib), note, environment)
        path = note(figure)
        if "failure" in figure:
            kept = path.with_name(f"{path.stem}-{name}.log")
            shutil.copyfile(log, kept)
            print(f"{kept}:\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
    print(json.dumps({name: figure}), flush=True)
    return figure


if __name__ == "__main__":
    sys.exit(min(main(), 1))
