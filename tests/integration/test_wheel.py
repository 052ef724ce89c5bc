"""Wheels and source distributions: what is in them, and that a wheel's kernels serve where there is no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from rollout_engine.kernels.cpu import recipes

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from rollout_engine import LLM, SamplingParams, testing
from rollout_engine.kernels.cpu.build import load_kernels
with LLM(testing.tiny_checkpoint("tiny", seed=3), dtype=sys.argv[1], log_stats=False) as llm:
    (output,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=24, n=3, seed=1), use_tqdm=False)
print(load_kernels()._name)
print([(sample.token_ids, sample.logprobs) for sample in output.outputs])
"""
needs_compiler = pytest.mark.skipif(
    not recipes.LEVELS[-1].features <= recipes.cpu_features() or shutil.which("g++") is None,
    reason="no g++, or a machine without compiled kernels",
)


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {Path(line) for line in listed.splitlines()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A source distribution, unpacked."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    folder, made = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    for path in tracked_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    backend = f"from setuptools.build_meta import build_sdist; build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", backend], cwd=folder, check=True, capture_output=True)
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(made, filter="data")
    archive.unlink()
    (unpacked,) = made.iterdir()
    return unpacked


@pytest.mark.slow
def test_a_source_distribution_has_every_file(source):
    assert not [path for path in sorted(tracked_files()) if not (source / path).exists()]


def run(python, folder, *arguments, **environment):
    """The lines that a program prints in a process of its own, and its log."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@needs_compiler
def test_a_wheel_from_the_source_distribution_serves_without_a_compiler_and_to_the_same_bits(source, tmp_path):
    install = [sys.executable, "-m", "pip", "--isolated", "--quiet"]
    build = [*install, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith("-py3-none-linux_x86_64")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert len([name for name in names if name.suffix == ".so"]) == len(recipes.LEVELS)

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    subprocess.run([*install, "install", "--no-deps", "--no-index", "--target", packages, wheel], check=True)
    # Dependencies are this environment's. Python reads no .pth file there, so an editable installation is not found.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    empty = tmp_path / "bin"
    empty.mkdir()
    for dtype in ("float32", "bfloat16"):
        environment = {"ROLLOUT_ENGINE_CACHE": str(tmp_path / "cache"), "PATH": str(empty)}
        (library, found), log = run(python, tmp_path, "-c", PROGRAM, dtype, **environment)
        assert Path(library).parent == packages / "rollout_engine" / "kernels" / "cpu" / "prebuilt"
        assert "ompil" not in log and not (tmp_path / "cache" / "kernels").exists()
        (compiled, expected), _ = run(sys.executable, tmp_path, "-c", PROGRAM, dtype, PYTHONPATH=str(ROOT))
        assert found == expected
        assert Path(compiled).name == Path(library).name and compiled != library
