"""The kernels of a wheel and their compilation: by platform and CPU, with a log line, and to the same bits."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_engine.kernels.cpu import build, gemm, recipes
from sync.own_files import CACHE_VARIABLE

SOURCES = Path(build.__file__).parent
MATMUL = [SOURCES / name for name in ("adapters.cpp", "gemm.cpp", "int8.cpp", "panels.cpp")]
"""Our matrix product and what it calls."""
FOLDER = Path("torch")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """A compiler that compiles one function in place of all sources, and fails with `-DBROKEN`."""
    (tmp_path / "small.cpp").write_text('extern "C" int answer() { return 42; }')
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo 1; exit;; *-DBROKEN*) echo broken >&2; exit 1;; esac\n'
        f'for last; do :; done; exec g++ -shared -fPIC {tmp_path}/small.cpp -o "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(build, "COMPILER", str(script))


def test_every_platform_has_its_native_flag_and_its_openmp(tmp_path):
    (old,) = recipes.recipes("linux", "x86_64", FOLDER, {"sse2", "avx"})
    assert {"-march=native", "-fopenmp"} < set(old.flags) and old.has_openmp
    (arm,) = recipes.recipes("linux", "aarch64", FOLDER)
    assert {"-mcpu=native", "-fopenmp"} < set(arm.flags) and arm.has_openmp
    (alone,) = recipes.recipes("darwin", "arm64", tmp_path)
    assert "-mcpu=native" in alone.flags and "-fopenmp" not in alone.flags and not alone.has_openmp
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libomp.dylib"
    library.touch()
    shared, last = recipes.recipes("darwin", "arm64", tmp_path)
    assert {"-Xpreprocessor", "-fopenmp", str(library)} < set(shared.flags) and shared.has_openmp
    assert last == alone


def test_an_x86_cpu_has_the_recipes_of_its_level_and_those_below():
    every = frozenset().union(*(level.features for level in recipes.LEVELS))
    for features, targets in {
        every: ["AMX", "AVX-512 BF16", "AVX-512", "AVX2"],
        every - {"amx_bf16"}: ["AVX-512 BF16", "AVX-512", "AVX2"],
        every - {"avx512_bf16"}: ["AVX-512", "AVX2"],
        every - {"avx512vl"}: ["AVX2"],
        every - {"fma"}: ["this CPU"],
    }.items():
        ways = recipes.recipes("linux", "x86_64", FOLDER, features)
        assert [way.target for way in ways] == targets
        names = {recipes.name_library(ways[0], "g++ 12", which) for which in (features, every)}
        assert len(names) == (2 if targets == ["this CPU"] else 1)


@pytest.mark.parametrize("system, machine", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")])
def test_no_compiler_may_choose_how_sums_are_rounded(system, machine):
    for way in recipes.recipes(system, machine, FOLDER, recipes.LEVELS[0].features):
        assert "-ffp-contract=off" in way.flags and not {"-ffast-math", "-Ofast"} & set(way.flags)


def test_recipes_import_nothing_that_is_installed():
    program = f"import sys; sys.path.insert(0, {str(SOURCES.parents[2])!r}); import rollout_engine.kernels.cpu.recipes"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)


@pytest.fixture
def prebuilt(tmp_path, monkeypatch, quick_compiler):
    """The folder of a wheel that a compiler of this machine has made, with a library for this CPU."""
    if not recipes.LEVELS[-1].features <= recipes.cpu_features():
        pytest.skip("wheels have no kernels for this CPU")
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    version = recipes.compiler_version(build.COMPILER)
    (folder / "compiler").write_text(version)
    way = recipes.recipes("linux", platform.machine(), FOLDER, recipes.cpu_features())[0]
    recipes.compile_sources(build.COMPILER, way.flags, folder / recipes.name_library(way, version), check=False)
    monkeypatch.setattr(build, "PREBUILT", folder)
    return folder


@needs_compiler
def test_kernels_of_a_wheel_need_no_compiler_and_are_named_as_compiled_ones(prebuilt, empty_cache, monkeypatch, caplog):
    compiler = build.COMPILER
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    library = build.open_kernels()
    assert library.answer() == 42 and Path(library._name).parent == prebuilt
    assert not caplog.messages and not empty_cache.exists()
    monkeypatch.setattr(build, "COMPILER", compiler)
    monkeypatch.setattr(build, "PREBUILT", prebuilt / "absent")
    assert Path(build.open_kernels()._name).name == Path(library._name).name


@needs_compiler
@pytest.mark.parametrize("fault", ["other sources", "damaged"])
def test_kernels_of_a_wheel_that_do_not_fit_are_named_and_compiled_anew(prebuilt, empty_cache, caplog, fault):
    (path,) = prebuilt.glob("*.so")
    if fault == "damaged":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.rename(prebuilt / "0123.so")
    library = build.open_kernels()
    assert library.answer() == 42 and Path(library._name).parent == empty_cache / "kernels"
    refusal, announcement = caplog.messages
    assert refusal.startswith(f"The C++ kernels in {prebuilt} are not used: ") and "Compiling" in announcement
    assert (f"and the sources in {prebuilt.parent}" in refusal) == (fault == "other sources")


@needs_compiler
def test_compiling_is_announced_once(empty_cache, quick_compiler, caplog):
    assert build.open_kernels().answer() == 42
    assert build.open_kernels().answer() == 42
    (line,) = caplog.messages
    assert line.startswith(f"Compiling the C++ kernels with {build.COMPILER} for ")
    assert line.endswith(". This takes about 10 s, once.")
    assert len(list((empty_cache / "kernels").iterdir())) == 1


@needs_compiler
def test_what_does_not_compile_with_openmp_is_compiled_without_and_kept(
    empty_cache, quick_compiler, caplog, monkeypatch
):
    ways = [recipes.Recipe(("-DBROKEN",), True), recipes.Recipe((), False)]
    monkeypatch.setattr(build, "recipes", lambda *platform: ways)
    assert build.open_kernels().answer() == 42
    assert caplog.messages[1].endswith(", without OpenMP: they will use one thread. This takes about 10 s, once.")
    build.open_kernels()
    assert len(caplog.messages) == 2


@needs_compiler
def test_what_never_compiles_says_what_the_compiler_said(empty_cache, quick_compiler, caplog, monkeypatch):
    monkeypatch.setattr(build, "recipes", lambda *platform: [recipes.Recipe(("-DBROKEN",), True)])
    assert build.load_kernels.__wrapped__() is None
    assert caplog.messages[-1] == "The C++ kernels are not available; slower torch code runs instead: broken\n"
    assert not list((empty_cache / "kernels").iterdir())


def takes_the_sources_without_a_warning(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    files = [str(path) for path in SOURCES.glob("*.cpp")]
    flags = ["-std=c++17", "-O1", "-fno-math-errno", "-Wall", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, *flags, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return True


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="their flags are of x86")
@pytest.mark.parametrize(
    "cpu",
    ["x86-64", *(pytest.param(each, marks=pytest.mark.slow) for each in ("x86-64-v3", "x86-64-v4", "sapphirerapids"))],
)
def test_the_sources_compile_for_every_cpu_whatever_this_one_is(cpu):
    """Each set of instructions has its own types of vectors: SSE, AVX2, AVX-512, AMX."""
    assert takes_the_sources_without_a_warning("g++", f"-march={cpu}", "-fopenmp")


COMMANDS = {
    "g++": ["g++", "-march=native"],
    "clang++": ["clang++", "-march=native"],
    "arm64": ["aarch64-linux-gnu-g++", "-march=armv8.2-a+bf16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("openmp", ["-fopenmp", "-Wno-unknown-pragmas"])
def test_every_compiler_takes_the_sources_without_a_warning(command, openmp):
    assert takes_the_sources_without_a_warning(*command, openmp)


@pytest.mark.slow
@needs_compiler
def test_bits_do_not_depend_on_openmp(tmp_path, monkeypatch):
    operands = [torch.randn(37, 70), torch.randn(90, 70), torch.randn(90)]
    calls = [operands, [operand.bfloat16() for operand in operands]]
    expected = [gemm.matmul(x, gemm.pack(weight), bias) for x, weight, bias in calls]
    (way,) = recipes.recipes("darwin", "x86_64", tmp_path)
    recipes.compile_sources("g++", way.flags, tmp_path / "alone.so", MATMUL)
    monkeypatch.setattr(build, "load_kernels", lambda: ctypes.CDLL(str(tmp_path / "alone.so")))
    gemm._library.cache_clear()
    try:
        torch.set_num_threads(2)
        assert all(
            torch.equal(gemm.matmul(x, gemm.pack(weight), bias), out)
            for (x, weight, bias), out in zip(calls, expected, strict=True)
        )
    finally:
        gemm._library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler, start",
    [
        (["g++", "-march=native"], []),
        (["g++", "-march=x86-64"], []),
        (["clang++", "-march=native"], []),
        (["aarch64-linux-gnu-g++", "-march=armv8.2-a", "-static"], ["qemu-aarch64"]),
    ],
    ids=["g++", "sse", "clang++", "arm64"],
)
def test_rows_are_the_same_bits_alone_and_in_a_batch_by_every_compiler(tmp_path, compiler, start):
    for program in (compiler[0], *start):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    files = [*MATMUL, Path(__file__).with_name("lone_rows.cpp")]
    flags = ["-O3", "-std=c++17", "-fno-math-errno", "-Wno-unknown-pragmas"]
    subprocess.run([*compiler, *flags, *files, "-o", tmp_path / "lone_rows"], check=True, capture_output=True)
    done = subprocess.run([*start, tmp_path / "lone_rows"], capture_output=True, text=True)
    kinds = ("float32", "bfloat16", "int8 codes of float32", "int8 codes of bfloat16")
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{kind} 1" for kind in kinds])
