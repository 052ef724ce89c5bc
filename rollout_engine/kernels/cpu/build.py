"""Compile the C++ kernels next to this file at first use, cache the shared library, and load it with ctypes.

The library's name is a digest of sources, flags, compiler and CPU, so a change of any compiles anew. It shares torch's
OpenMP pool (a process should have one OpenMP library); every entry point takes its number of threads. Linux uses g++,
macOS clang++ (whose flags are tested on Linux only).
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
from typing import Any, NamedTuple

import torch

from sync.own_files import cache_directory

logger = logging.getLogger("rollout_engine")

COMPILER = "clang++" if sys.platform == "darwin" else "g++"

_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared", "-Wall")
_TIMEOUT_SECONDS = 900
"""Limit of one compilation, which takes ten seconds on an idle machine."""


class Recipe(NamedTuple):
    """Compiler flags, and whether they enable OpenMP."""

    flags: tuple[str, ...]
    has_openmp: bool


def recipes(system: str, machine: str, torch_folder: Path) -> list[Recipe]:
    """Recipes for a platform (`sys.platform`, `platform.machine()`), in order of preference."""
    flags = (*_FLAGS, "-mcpu=native" if machine in ("arm64", "aarch64") else "-march=native")
    if system != "darwin":
        return [Recipe((*flags, "-fopenmp"), True)]
    # Apple's clang has no OpenMP library. torch brings one, and two in one process conflict.
    library = torch_folder / "lib" / "libomp.dylib"
    linked = (*flags, "-Xpreprocessor", "-fopenmp", str(library), f"-Wl,-rpath,{library.parent}")
    return [Recipe(linked, True)] * library.exists() + [Recipe((*flags, "-Wno-unknown-pragmas"), False)]


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels. If they cannot be built: None, and one warning; the eager twins run instead."""
    try:
        return open_kernels()
    except (OSError, subprocess.SubprocessError) as problem:
        logger.warning("The C++ kernels are not available; slower torch code runs instead: %s", reason(problem))
        return None


def declared(**signatures: tuple[Any, ...]) -> ctypes.CDLL:
    """The compiled kernels with these functions declared: name -> (result type, argument types...)."""
    library = load_kernels()
    assert library is not None, "check that the kernels are available first"
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def describe_kernels() -> str:
    """Digest of the compiled kernels' sources, flags, compiler and CPU. "none" without them."""
    library = load_kernels()
    return "none" if library is None else Path(str(library._name)).stem


def reason(problem: OSError | subprocess.SubprocessError) -> str:
    """The compiler's message, or why the compiler did not run."""
    return getattr(problem, "stderr", None) or str(problem)


def open_kernels() -> ctypes.CDLL:
    """The compiled kernels. Raises `OSError` or `subprocess.SubprocessError` if they cannot be built or loaded."""
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
    """Compile by the first recipe whose library loads. Raises the last one's error if none does."""
    for way in ways:
        threads = "" if way.has_openmp else ", without OpenMP: they will use one thread"
        logger.warning("Compiling the C++ kernels with %s%s. This takes about 10 s, once.", COMPILER, threads)
        try:
            return _compile(sources, way.flags, target)
        except (OSError, subprocess.SubprocessError):
            if way is ways[-1]:
                raise


def _compile(sources: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compile to a temporary file first: another process may be compiling the same library."""
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
    """The CPU's features, which `native` flags depend on: machines may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
