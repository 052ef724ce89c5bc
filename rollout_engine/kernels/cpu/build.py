"""Compile the C++ kernels beside this file with plain g++ at first use, keep the library, load it with ctypes.

One library holds them all. It is kept under a name that digests sources, flags, compiler and CPU, so a change of any
makes a new one. It shares torch's OpenMP pool (one libgomp a process); every entry point takes its number of threads.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger("rollout_engine")

CACHE_VARIABLE = "ROLLOUT_ENGINE_CACHE"
"""Environment variable that moves the cache away from the user's cache directory."""

_COMPILER = "g++"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared", "-Wall")
_TIMEOUT_SECONDS = 900
"""Of one compilation: ten seconds where nothing else runs."""


def cache_directory(name: str) -> Path:
    """Where derived files of one kind are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(home) / "rollout_engine") / name


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, and one line in the log, where they cannot be built: eager twins serve then."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as problem:
        detail = getattr(problem, "stderr", None) or problem
        logger.warning("The C++ kernels are off, torch serves in their place, more slowly: %s", detail)
        return None


def _built() -> Path:
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    version = subprocess.run([_COMPILER, "--version"], check=True, capture_output=True, text=True).stdout
    digest = hashlib.blake2b(digest_size=16)
    for part in (*_FLAGS, version, _cpu_flags(), *(path.read_text() for path in sources)):
        digest.update(part.encode() + b"\0")
    target = cache_directory("kernels") / f"{digest.hexdigest()}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile([str(path) for path in sources if path.suffix == ".cpp"], target)
    return target


def _compile(sources: list[str], target: Path) -> None:
    """Into a temporary file first: another process may be doing the same."""
    descriptor, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [_COMPILER, *_FLAGS, *sources, "-o", unfinished]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
