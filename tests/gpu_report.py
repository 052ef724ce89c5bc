"""Runs everything that a machine with a GPU can tell of this library, and writes one report to send.

    python -m tests.gpu_report                          tests, then figures; at most three hours
    python -m tests.gpu_report --parts engine attention some of it
    python -m tests.gpu_report --list                   the commands, which may be run by themselves

Every part is a process of its own with a time limit: one that fails or hangs leaves the others theirs. The report is
written anew after each. It holds what the parts print, versions, and environment variables of CUDA, NCCL, torch and
Triton; nothing of your models or data. Without a GPU it says what is missing and writes nothing.
Tests and `tests.benchmarks.gpu` have run on a device; the sanitizers, figures of kernels and tuning have not.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu_check import require_gpu

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
_SHOWN_LINES = 400
"""Lines of one part that are kept, the last ones."""
_PREFIXES = ("CUDA_", "NCCL_", "PYTORCH_", "TORCH_", "TRITON_")
_TESTS = (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-rs", "--tb=short")
_SANITIZER = ("compute-sanitizer", "--target-processes=all", "--error-exitcode=9")


class Part(NamedTuple):
    """A command, and how long it may take."""

    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = {}


PARTS = {
    "machine": Part(("nvidia-smi",), 60),
    "doctor": Part((PYTHON, "-m", "rollout_engine", "doctor"), 300),
    "kernels": Part((*_TESTS, "tests/unit/kernels/triton"), 900),
    "weights": Part((*_TESTS, "tests/unit/sync"), 600),
    "engine": Part((*_TESTS, "tests/unit/model/cuda"), 900),
    "memcheck": Part(
        (*_SANITIZER, "--tool=memcheck", *_TESTS, "tests/unit/kernels/triton"),
        1800,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else writes past a tensor's end fall into torch's own memory
    ),
    "racecheck": Part(
        (*_SANITIZER, "--tool=racecheck", *_TESTS, "tests/unit/kernels/triton/test_kernels_gpu.py"), 1800
    ),
    "attention": Part((PYTHON, "tests/benchmarks/attention_gpu.py", "--json"), 600),
    "kernel figures": Part((PYTHON, "tests/benchmarks/kernels_gpu.py", "--json"), 600),
    "benchmark": Part((PYTHON, "-m", "tests.benchmarks.gpu", "--seconds", "900"), 1200),
    "tune decode": Part((PYTHON, "tests/benchmarks/attention_gpu.py", "--tune", "decode"), 600),
    "tune prefill": Part((PYTHON, "tests/benchmarks/attention_gpu.py", "--tune", "prefill"), 600),
    "tune groups": Part((PYTHON, "tests/benchmarks/attention_gpu.py", "--tune", "groups"), 600),
    "tune products": Part((PYTHON, "tests/benchmarks/kernels_gpu.py", "--tune"), 600),
}


class Result(NamedTuple):
    """The outcome of a part."""

    status: str
    """Such as "passed", "failed (exit status 1)", "timed out after 60 s", "not run: no nvidia-smi"."""
    seconds: float
    output: str


def run(part: Part) -> Result:
    """Run one part. Its processes are ended with it."""
    if shutil.which(part.command[0]) is None:
        return Result(f"not run: no {part.command[0]}", 0.0, "")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start, environment = time.monotonic(), os.environ | {"PYTHONPATH": path} | dict(part.environment)
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=part.seconds)
        status = "passed" if process.returncode == 0 else f"failed (exit status {process.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = f"timed out after {part.seconds:g} s"
    except BaseException:  # an interrupt
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Result(status, time.monotonic() - start, output)


def written(results: Mapping[str, Result], parts: Mapping[str, Part]) -> str:
    """The report, as Markdown: a line for each part, then what each printed."""
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    lines = ["# GPU report of rollout-engine", "", f"{versions}, {platform.platform()}", *variables, ""]
    lines += ["| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {result.status} | {result.seconds:.0f} |" for name, result in results.items()]
    for name, result in results.items():
        lines += ["", f"## {name}: {result.status}", "", "```", " ".join(parts[name].command)]
        lines += [*result.output.splitlines()[-_SHOWN_LINES:], "```"]
    return "\n".join(lines) + "\n"


def report(parts: Mapping[str, Part], path: Path) -> dict[str, Result]:
    """Run `parts` one after the other; the report is at `path`, and has all that have run so far."""
    results: dict[str, Result] = {}
    for name, part in parts.items():
        print(f"{name} ...", flush=True)
        results[name] = run(part)
        print(f"{name}: {results[name].status}, {results[name].seconds:.0f} s", flush=True)
        path.write_text(written(results, parts), encoding="utf-8")
    return results


def main() -> None:
    """Run what the command line asks for. Exit status 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_report.md"))
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args()
    parts = {name: PARTS[name] for name in args.parts}
    if args.list:
        for name, part in parts.items():
            set_first = "".join(f"{variable}={value} " for variable, value in part.environment.items())
            print(f"{name:16}{set_first}{' '.join(part.command)}")
        return
    require_gpu()
    results = report(parts, args.out)
    print(f"Written to {args.out}.")
    if any(result.status.startswith(("failed", "timed out")) for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
