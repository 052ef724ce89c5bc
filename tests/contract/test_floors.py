"""Who may import whom, as docs/architecture.md says. Imports inside functions and under TYPE_CHECKING count.

One exception: `rollout_engine/__init__.py` imports every public name under TYPE_CHECKING, for editors alone.
"""

import ast
import re
import subprocess
import sys

import pytest

from tests.contract.house import measure, rooms_from_the_ground
from tests.contract.sources import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
OUTSIDE = ("sync", "worker_ext", "envs_adapters")
EVERYTHING = ("rollout_engine", *OUTSIDE)
BASE = "rollout_engine.base"
UNDER_THE_BASE = ("sync", "worker_ext", "rollout_engine.kernels")

# The budget of the house. A change that needs more of it says so in its decision.
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS, MOST_UPWARD = 32, 16, 131, 2
MAY_IMPORT_ANYTHING = {"rollout_engine.cli", "rollout_engine.testing"}


def _names(cell: str) -> list[str]:
    names = re.findall(r"`([\w.]+)`", cell)
    return [name if _within(name, OUTSIDE) else f"rollout_engine.{name}" for name in names]


def _within(name: str, owners: tuple[str, ...]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _read_page() -> dict[str, tuple[str, ...]]:
    """Room -> what of ours it may import, besides itself. The longest matching name on either side counts."""
    rules: dict[str, tuple[str, ...]] = {"rollout_engine": (f"{BASE}.version",)}
    for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE):
        _, rooms, _, allowed, _ = row.split("|")
        for room in _names(rooms):
            base = () if room in UNDER_THE_BASE else (BASE,)
            rules[room] = EVERYTHING if allowed.strip() == "anything" else (*base, *_names(allowed))
    return rules


MAY_IMPORT = _read_page()
TOP = ("rollout_engine.__main__", "rollout_engine.cli")

# They import what is asked for by name, so that nothing heavy is loaded before.
LAZY_DOORS = ("rollout_engine", "rollout_engine.cli.main", "rollout_engine.testing", "sync")

TORCH_FREE = ("rollout_engine.core", "rollout_engine.fleet.plan", *MAY_IMPORT[BASE])
HEAVY = {"torch", "tensordict", "transformers", "tokenizers", "safetensors", "socket", "zmq", "time"}
BASE_MODULES = sorted(f"{BASE}.{path.stem}" for path in (ROOT / "rollout_engine" / "base").glob("*.py"))


def test_the_house_keeps_its_budget(package_sources):
    house = measure(package_sources, rooms_from_the_ground(PAGE))
    assert len(house.floors) <= MOST_ROOMS
    assert max(house.floors.values()) <= MOST_FLOORS
    assert len(house.arrows) <= MOST_ARROWS
    assert len(house.upward) <= MOST_UPWARD, house.upward
    assert not house.circle


def test_only_the_command_line_and_the_testing_tools_may_import_anything():
    assert {room for room, allowed in MAY_IMPORT.items() if allowed == EVERYTHING} == MAY_IMPORT_ANYTHING


def test_rows_allow_no_more_than_is_imported(package_sources):
    used = {(_rule(s.module), found.name) for s in package_sources for found in s.imports()}
    unused = [
        (room, name)
        for room, allowed in MAY_IMPORT.items()
        if allowed != EVERYTHING
        for name in allowed
        if name != BASE and not any(by == room and _within(found, (name,)) for by, found in used)
    ]
    assert not unused


def test_every_module_has_a_floor(package_sources):
    without = [source.where for source in package_sources if _rule(source.module) is None]
    assert not without, f"name their room in docs/architecture.md: {without}"


def test_imports_only_go_down(package_sources):
    wrong = [
        f"{source.where}:{found.line} imports {found.name}"
        for source in package_sources
        for found in source.imports()
        if _is_ours(found.name) and not source.is_for_editors(found) and not _allowed(source.module, found.name)
    ]
    assert not wrong, wrong


def test_our_modules_are_imported_at_the_top_of_the_file(sources):
    wrong = [
        f"{source.where}:{found.line} imports {found.name}"
        for source in sources
        for found in source.imports()
        if _is_ours(found.name) and (found.in_function or found.type_checking) and not source.is_for_editors(found)
    ]
    assert not wrong, wrong


def test_no_module_of_ours_is_loaded_by_a_string(package_sources):
    wrong = [
        f"{source.where}:{call.lineno} loads {ast.unparse(call)}"
        for source in package_sources
        if source.module not in LAZY_DOORS
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("import_module", "__import__"))
        if any(isinstance(n, ast.Constant) and _is_ours(str(n.value).rstrip(".")) for n in ast.walk(call))
    ]
    assert not wrong, wrong


def test_the_brain_imports_neither_torch_nor_sockets_nor_clock(package_sources):
    wrong = [
        f"{source.where}:{found.line} imports {found.name}"
        for source in package_sources
        if _within(source.module, TORCH_FREE)
        for found in source.imports()
        if found.name.split(".")[0] in HEAVY
    ]
    assert not wrong, wrong


QUICK_MODULES = ["rollout_engine", "rollout_engine.core.engine_core", "rollout_engine.testing.pytest_plugin"]


@pytest.mark.parametrize("module", [*QUICK_MODULES, *BASE_MODULES])
def test_torch_stays_unloaded(module):
    code = f"import sys, {module}; print(sorted({HEAVY - {'socket', 'time'}!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_importing_the_package_is_quick():
    """It costs less than to import asyncio does, on any machine."""
    code = (
        "import time; start = time.process_time(); import rollout_engine; ours = time.process_time(); import asyncio\n"
        "print((ours - start) / (time.process_time() - ours))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 1


def _is_ours(name: str) -> bool:
    return _within(name, EVERYTHING)


def _rule(module: str) -> str | None:
    """The longest entry of MAY_IMPORT that covers `module`; the bare `rollout_engine` covers only itself."""
    matches = [owner for owner in MAY_IMPORT if module == owner or module.startswith(f"{owner}.")]
    owner = max(matches, key=len, default=None)
    return None if owner == "rollout_engine" != module else owner


def _allowed(module: str, target: str) -> bool:
    owner = _rule(module)
    assert owner is not None
    if target == "rollout_engine":  # the public face looks down on everybody but the command line
        return owner in TOP
    return target == owner or target.startswith(f"{owner}.") or _within(target, MAY_IMPORT[owner])
