"""Compile the C++ kernels into wheels for Linux on x86-64, once for each level of its instructions.

`pyproject.toml` has all else. Other wheels have the sources alone, and an editable installation runs from them: there
the kernels are compiled at first use.
"""

import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from rollout_engine.kernels.cpu.recipes import (
    COMPILER,
    LEVELS,
    PREBUILT,
    Recipe,
    compile_sources,
    compiler_version,
    name_library,
    recipes,
)


def find_recipes() -> list[Recipe]:
    """The recipe of each level; none on other platforms, and without a compiler that has the flags of all."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return []
    ways = [recipes("linux", "x86_64", Path(), level.features)[0] for level in LEVELS]
    probe = [COMPILER, *ways[0].flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    if shutil.which(COMPILER) is None or (done := subprocess.run(probe, capture_output=True, text=True)).returncode:
        why = "there is none on PATH" if shutil.which(COMPILER) is None else done.stderr.strip()
        print(f"This wheel has no compiled kernels, which takes a {COMPILER} for {ways[0].target}: {why}", flush=True)
        return []
    return ways


WAYS = find_recipes()


class BuildKernels(build_py):
    """Copies the packages, and compiles a library for each level into the copy."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, PREBUILT.relative_to(Path(__file__).parent))
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if self.editable_mode or not WAYS:
            return
        folder.mkdir(parents=True)
        version = compiler_version(COMPILER)
        print(f"Compiling the C++ kernels for {', '.join(way.target for way in WAYS)}.", flush=True)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda way: self._compile(way, folder / name_library(way, version)), WAYS))
        (folder / "compiler").write_text(version)

    @staticmethod
    def _compile(way: Recipe, target: Path) -> None:
        try:
            compile_sources(COMPILER, way.flags, target, check=False)  # this CPU may not have the level
            target.chmod(0o755)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"The C++ kernels do not compile for {way.target}:\n{error.stderr}") from error


class PlatformWheel(bdist_wheel):
    """A wheel with libraries is for one platform and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if WAYS else tag


class Kernels(Distribution):
    """Files that are compiled belong to a platform's folders, as those of extension modules do."""

    def has_ext_modules(self) -> bool:
        return bool(WAYS)


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel}, distclass=Kernels)
