"""The C++ kernels under AddressSanitizer and UBSan: python -m tests.faults.sanitize [--seeds N], from the root.

The compiler of `kernels.cpu.build` is replaced by one that instruments what it builds, into build/sanitize. The unit
tests of the kernels run from that and, for every seed, the fuzz of wrong tensors. First, two planted faults have to be
found.
Figures go to results/MACHINE/DATE.json with what was found; any finding and any failed test is exit status 1.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_engine.kernels.cpu import build
from sync.own_files import CACHE_VARIABLE
from tests.benchmarks.results import save

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sanitize"
UNIT_TESTS = ["tests/unit/kernels", "--ignore=tests/unit/kernels/triton"]
UNIT_TESTS += ["tests/unit/grammars/test_masks.py", "tests/unit/model/sampling/test_restricted_rows.py"]
FUZZ = "tests/fuzz/wrong_tensors.py"
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer -g -O1"
_FINDING = re.compile(r"^(?:SUMMARY: (AddressSanitizer.+)|(\S+: runtime error: .+))$", re.MULTILINE)
_FUNCTION = re.compile(r"^Function '(\w+)'\nLines executed:([\d.]+)% of (\d+)$", re.MULTILINE)
PLANTED = """
#include <climits>
extern "C" int past_the_end(const int* values) { return values[8]; }
extern "C" int overflow(int value) { return value + INT_MAX; }
"""
CALLS = {
    "heap-buffer-overflow": "library.past_the_end(ctypes.c_void_p(torch.zeros(8, dtype=torch.int32).data_ptr()))",
    "signed integer overflow": "library.overflow(1)",
}


class Sanitizers:
    """Runs Python with an instrumented build of the kernels, and collects what the sanitizers report."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.compiler = folder, shutil.which(build.COMPILER)
        self._reports: list[str] = []
        if self.compiler is None:
            raise SystemExit(f"make sanitize needs {build.COMPILER}; there is none on PATH.")
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        wrapper = folder / "bin" / build.COMPILER
        counts = f'case "$*" in *{folder}/cache/*) counts=--coverage;; esac'  # beside what is compiled, so here alone
        wrapper.write_text(f'#!/bin/sh\n{counts}\nexec {self.compiler} "$@" {FLAGS} $counts\n')
        wrapper.chmod(0o755)
        libraries = [self.told(f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": f"log_path={folder}/report:detect_leaks=0",  # Python frees little before it ends
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONMALLOC": "malloc",  # else small objects lie in arenas, where nothing is noticed
            "PYTHONPATH": str(ROOT),
            CACHE_VARIABLE: str(folder / "cache"),
        }

    def told(self, question: str) -> str:
        """What the compiler answers."""
        return subprocess.run([self.compiler, question], check=True, capture_output=True, text=True).stdout.strip()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments until it ends."""
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        self._reports.append(done.stderr)  # UBSan's are here, AddressSanitizer's in files
        return done

    def take_reports(self) -> list[str]:
        """Return all reports since the last call."""
        paths = sorted(self.folder.glob("report.*"))
        reports, self._reports = [*self._reports, *(path.read_text() for path in paths)], []
        for path in paths:
            path.unlink()
        return [report for report in reports if _FINDING.search(report)]

    def find_planted(self) -> list[str]:
        """Raise unless the planted faults are found; returns their kinds."""
        source, library = self.folder / "planted.cpp", self.folder / "planted.so"
        source.write_text(PLANTED)
        command = [self.folder / "bin" / build.COMPILER, source, "-shared", "-fPIC", "-o", library]
        subprocess.run(command, check=True)
        for kind, call in CALLS.items():
            self.run("-c", f"import ctypes, torch; library = ctypes.CDLL('{library}'); {call}")
            found = findings_in(self.take_reports())
            assert any(kind in finding for finding in found), f"a planted fault, {kind}, was not found: {found}"
        return list(CALLS)


def findings_in(reports: Iterable[str]) -> dict[str, int]:
    """The distinct findings of these reports, and how often each came."""
    found = ("".join(either) for report in reports for either in _FINDING.findall(report))
    return dict(Counter(each.replace(f"{ROOT}/", "") for each in found))


def unit_tests(sanitizers: Sanitizers) -> dict[str, Any]:
    """Run the kernels' unit tests."""
    results = sanitizers.folder / "tests.xml"
    options = ["--capture=no", "-p", "no:cacheprovider", f"--junitxml={results}"]  # captured, reports would be lost
    done = sanitizers.run("-m", "pytest", "-q", *options, *UNIT_TESTS)
    if not results.exists():
        raise SystemExit(f"pytest ended by {done.returncode} and left no results:\n{done.stdout[-4000:]}")
    (suite,) = ElementTree.parse(results).getroot()
    found = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    if done.returncode:
        print(done.stdout[-8000:])
    return found


def fuzz(sanitizers: Sanitizers, num_seeds: int) -> dict[str, Any]:
    """Run the fuzz of wrong tensors, once for every seed."""
    found = Counter(seeds=0, calls=0, failures=0)
    for seed in range(num_seeds):
        done = sanitizers.run("-W", "error", FUZZ, str(seed))
        lines = done.stdout.splitlines()
        failed = [line for line in lines if line.startswith("FAILED")]
        if done.returncode and not failed:
            failed = [f"ended by {done.returncode} in: {lines[-1:]}"]
        for line in failed:
            print(line)
        found.update(seeds=1, calls=len(lines) - len(failed), failures=len(failed))
    return dict(found)


def entries_run(folder: Path) -> tuple[list[str], list[str]]:
    """The C++ entries that have run, and those that have not, by the counts of `--coverage`."""
    counts = sorted(str(path) for path in (folder / "cache" / "kernels").glob("*.gcda"))
    command = ["gcov", "--function-summaries", "--no-output", *counts]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
    lines = {name: float(percent) for name, percent, _ in _FUNCTION.findall(told)}
    (library,) = (folder / "cache" / "kernels").glob("*.so")
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    sources = "".join(path.read_text() for path in Path(build.__file__).parent.glob("*.cpp"))
    names = [name for name in re.findall(r" T ([a-z]\w+)$", symbols, re.MULTILINE) if f" {name}(" in sources]
    run = sorted(name for name in names if lines.get(name, 0.0) > 0)
    return run, sorted(set(names) - set(run))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.sanitize", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of the fuzz of wrong tensors")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(None if arguments is None else list(arguments))
    start = time.perf_counter()
    sanitizers = Sanitizers(FOLDER)
    planted = sanitizers.find_planted()
    tests, fuzzed = unit_tests(sanitizers), fuzz(sanitizers, options.seeds)
    reports = sanitizers.take_reports()
    run, not_run = entries_run(FOLDER)
    figure = dict(
        planted_faults_found=planted,
        unit_tests=tests,
        fuzz=fuzzed,
        entries_run=run,
        entries_not_run=not_run,
        findings=findings_in(reports),
        seconds=round(time.perf_counter() - start, 1),
    )
    print(*reports[:3], json.dumps({"sanitize": figure}), sep="\n", flush=True)
    versions = {"compiler": sanitizers.told("--version").splitlines()[0], "flags": FLAGS}
    save(options.results, "sanitize", figure | versions, {}, f"make sanitize SEEDS={options.seeds}")
    bad = tests["failures"] or tests["errors"] or fuzzed["failures"] or figure["findings"] or not_run
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
