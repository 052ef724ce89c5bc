"""Compile the C++ kernels beside this file at first use, keep the library, load it with ctypes.

One library holds them all. It is kept under a name that digests sources, flags, compiler and CPU, so a change of any
makes a new one. It shares torch's OpenMP pool (one library of OpenMP a process); every entry point takes its number of
threads. On Linux plain g++ compiles, on macOS clang++ (tried on Linux alone, with and without OpenMP).
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

logger = logging.getLogger("rollout_engine")

CACHE_VARIABLE = "ROLLOUT_ENGINE_CACHE"
"""Environment variable that moves the cache away from the user's cache directory."""

COMPILER = "clang++" if sys.platform == "darwin" else "g++"

_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared", "-Wall")
_TIMEOUT_SECONDS = 900
"""Of one compilation: ten seconds where nothing else runs."""


class Recipe(NamedTuple):
    """One way to compile."""

    flags: tuple[str, ...]
    has_openmp: bool


def recipes(system: str, machine: str, torch_folder: Path) -> list[Recipe]:
    """Ways to compile for a platform, by `sys.platform` and `platform.machine()`; the first that works is taken."""
    flags = (*_FLAGS, "-mcpu=native" if machine in ("arm64", "aarch64") else "-march=native")
    if system != "darwin":
        return [Recipe((*flags, "-fopenmp"), True)]
    # Apple's clang knows OpenMP and has no library for it. torch brings one, and two in a process do not get along.
    library = torch_folder / "lib" / "libomp.dylib"
    linked = (*flags, "-Xpreprocessor", "-fopenmp", str(library), f"-Wl,-rpath,{library.parent}")
    return [Recipe(linked, True)] * library.exists() + [Recipe((*flags, "-Wno-unknown-pragmas"), False)]


def cache_directory(name: str) -> Path:
    """Where derived files of one kind are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(home) / "rollout_engine") / name


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, and one line in the log, where they cannot be built: eager twins serve then."""
    try:
        return open_kernels()
    except (OSError, subprocess.SubprocessError) as problem:
        logger.warning("The C++ kernels are off, torch serves in their place, more slowly: %s", reason(problem))
        return None


def reason(problem: OSError | subprocess.SubprocessError) -> str:
    """Return the compiler's message, or else the reason why it did not run."""
    return getattr(problem, "stderr", None) or str(problem)


def open_kernels() -> ctypes.CDLL:
    """The compiled kernels. Raises `OSError` or `subprocess.SubprocessError` where they cannot be built or loaded."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout
    ways = recipes(sys.platform, platform.machine(), Path(torch.__file__).parent)
    digest = hashlib.blake2b(digest_size=16)
    for part in (*(f for way in ways for f in way.flags), version, _cpu_flags(), *(p.read_text() for p in sources)):
        digest.update(part.encode() + b"\0")
    target = cache_directory("kernels") / f"{digest.hexdigest()}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile_first([str(path) for path in sources if path.suffix == ".cpp"], ways, target)
    return ctypes.CDLL(str(target))


def _compile_first(sources: list[str], ways: list[Recipe], target: Path) -> None:
    """By the first of `ways` that gives a library that loads; the error of the last one, where none does."""
    for way in ways:
        threads = "" if way.has_openmp else ", without OpenMP: they will run on one thread"
        logger.warning("Compiling the C++ kernels with %s%s. It takes about 10 s, once.", COMPILER, threads)
        try:
            return _compile(sources, way.flags, target)
        except (OSError, subprocess.SubprocessError):
            if way is ways[-1]:
                raise


def _compile(sources: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Into a temporary file first: another process may be doing the same."""
    descriptor, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [COMPILER, *sources, *flags, "-o", unfinished]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        ctypes.CDLL(unfinished)
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cpu_flags() -> str:
    """Describe the CPU that the flag `native` stands for: a home directory may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
