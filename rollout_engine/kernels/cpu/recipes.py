"""How the C++ kernels are compiled: their sources, the flags for a platform and its CPU, and the names of libraries.

`setup.py` compiles by the same recipes, so nothing that is installed is imported here. The flags leave a compiler no
choice that changes bits: it may neither fuse a product into a sum nor reorder one. So the bits of a level do not depend
on the compiler, nor on whether a wheel or this machine compiled the kernels.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

COMPILER = "clang++" if sys.platform == "darwin" else "g++"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries that a wheel has compiled, and the file `compiler` with the version of the compiler that made them."""

_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared", "-Wall")
_TIMEOUT_SECONDS = 900
"""Limit of one compilation, which takes ten seconds on an idle machine."""


class Recipe(NamedTuple):
    """Compiler flags, whether they enable OpenMP, and the CPUs that they are for."""

    flags: tuple[str, ...]
    has_openmp: bool
    target: str = "this CPU"


class Level(NamedTuple):
    """A set of x86 instructions: its name, the features that Linux lists for it, and the flags that enable them."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


def _levels() -> list[Level]:
    """The levels of x86-64, each with all that the one before it has, the highest first."""
    added = {
        "AVX2": "avx2 fma f16c bmi1 bmi2 abm movbe popcnt",
        "AVX-512": "avx512f avx512bw avx512cd avx512dq avx512vl",
        "AVX-512 BF16": "avx512_bf16",
        "AMX": "amx_tile amx_bf16",
    }
    spelled = {"abm": "lzcnt", "bmi1": "bmi", "avx512_bf16": "avx512bf16"}
    found: list[Level] = []
    for name, features in added.items():
        below = found[0] if found else Level("", frozenset(), ("-march=x86-64", "-mtune=generic"))
        flags = tuple(f"-m{spelled.get(feature, feature.replace('_', '-'))}" for feature in features.split())
        found.insert(0, Level(name, below.features.union(features.split()), below.flags + flags))
    return found


LEVELS = _levels()


def recipes(system: str, machine: str, torch_folder: Path, features: Collection[str] = ()) -> list[Recipe]:
    """Recipes for a platform (`sys.platform`, `platform.machine()`, `cpu_features()`), in order of preference."""
    if system == "darwin":
        flags = (*_FLAGS, _native(machine))
        # Apple's clang has no OpenMP library. torch brings one, and two in one process conflict.
        library = torch_folder / "lib" / "libomp.dylib"
        linked = (*flags, "-Xpreprocessor", "-fopenmp", str(library), f"-Wl,-rpath,{library.parent}")
        return [Recipe(linked, True)] * library.exists() + [Recipe((*flags, "-Wno-unknown-pragmas"), False)]
    # An old compiler may not have the flags of the highest level.
    levels = [level for level in LEVELS if machine == "x86_64" and level.features <= set(features)]
    if not levels:
        return [Recipe((*_FLAGS, _native(machine), "-fopenmp"), True)]
    return [Recipe((*_FLAGS, *level.flags, "-fopenmp"), True, level.name) for level in levels]


def cpu_features() -> frozenset[str]:
    """The names of the CPU's features, by Linux; elsewhere its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset({f"{platform.machine()} {platform.processor()}"})
    line = next((line for line in lines if line.startswith(("flags", "Features"))), f":{platform.machine()}")
    return frozenset(line.partition(":")[2].split())


def compiler_version(compiler: str) -> str:
    """A compiler's own description. Raises `OSError` or `subprocess.SubprocessError` if there is none of that name."""
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout


def name_library(way: Recipe, version: str, features: Collection[str] = ()) -> str:
    """The file name of a library: a digest of sources, flags and compiler, and of the CPU if the flags depend on it."""
    is_native = any(flag.endswith("=native") for flag in way.flags)
    parts = [*way.flags, version, *(sorted(features) if is_native else ())]
    digest = hashlib.blake2b(digest_size=16)
    for part in (*parts, *(path.read_text() for path in _sources(".cpp", ".h"))):
        digest.update(part.encode() + b"\0")
    return f"{digest.hexdigest()}.so"


def compile_sources(
    compiler: str, flags: Sequence[str], target: Path, sources: Sequence[Path] = (), *, check: bool = True
) -> None:
    """Compile the kernels, or these sources. `target` appears whole: another process may be compiling the same library.

    `check`: raise `OSError` unless this process can load it.
    """
    files = [str(path) for path in sources or _sources(".cpp")]
    descriptor, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *files, *flags, "-o", unfinished]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        if check:
            ctypes.CDLL(unfinished)
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in suffixes)


def _native(machine: str) -> str:
    return "-mcpu=native" if machine in ("arm64", "aarch64") else "-march=native"
