"""Load the C++ kernels with ctypes: those that the installed wheel has compiled, or else compile them at first use.

Wheels for Linux on x86-64 have a library for each level (`recipes.LEVELS`) in `prebuilt/`. A library's name is a digest
of its sources, flags and compiler, so one of other sources is not found, and a change of any compiles anew, into the
user's cache. Nothing of torch is compiled in; the library shares its OpenMP pool (a process should have one OpenMP
library), and every entry point takes its number of threads. Linux uses g++, macOS clang++ (whose flags are tested on
Linux only).
"""

import ctypes
import logging
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rollout_engine.kernels.cpu.recipes import (
    COMPILER as COMPILER,
)
from rollout_engine.kernels.cpu.recipes import (
    PREBUILT,
    Recipe,
    compile_sources,
    compiler_version,
    cpu_features,
    name_library,
    recipes,
)
from sync.own_files import cache_directory

logger = logging.getLogger("rollout_engine")


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
    """Digest of the compiled kernels' sources, flags and compiler. "none" without them."""
    library = load_kernels()
    return "none" if library is None else Path(str(library._name)).stem


def reason(problem: OSError | subprocess.SubprocessError) -> str:
    """The compiler's message, or why the compiler did not run."""
    return getattr(problem, "stderr", None) or str(problem)


def open_kernels() -> ctypes.CDLL:
    """The compiled kernels. Raises `OSError` or `subprocess.SubprocessError` if they cannot be built or loaded."""
    features = cpu_features()
    ways = recipes(sys.platform, platform.machine(), Path(torch.__file__).parent, features)
    if (library := _open_prebuilt(ways)) is not None:
        return library
    target = cache_directory("kernels") / name_library(ways[0], compiler_version(COMPILER), features)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile_first(ways, target)
    return ctypes.CDLL(str(target))


def _open_prebuilt(ways: Sequence[Recipe]) -> ctypes.CDLL | None:
    """The wheel's library for this CPU. None, and a warning, if there is none of these sources, or it does not load."""
    if not (PREBUILT / "compiler").exists():
        return None  # a source checkout, or a wheel for other platforms
    path = PREBUILT / name_library(ways[0], (PREBUILT / "compiler").read_text())
    if not path.exists():
        problem = f"none is for {ways[0].target} and the sources in {PREBUILT.parent}"
    else:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = str(error)
    logger.warning("The C++ kernels in %s are not used: %s.", PREBUILT, problem)
    return None


def _compile_first(ways: Sequence[Recipe], target: Path) -> None:
    """Compile by the first recipe whose library loads. Raises the last one's error if none does."""
    for way in ways:
        threads = "" if way.has_openmp else ", without OpenMP: they will use one thread"
        logger.warning(
            "Compiling the C++ kernels with %s for %s%s. This takes about 10 s, once.", COMPILER, way.target, threads
        )
        try:
            return compile_sources(COMPILER, way.flags, target)
        except (OSError, subprocess.SubprocessError):
            if way is ways[-1]:
                raise
