"""Who may import whom. Every import counts: inside functions and under TYPE_CHECKING too.

One exception: `rollout_engine/__init__.py` imports every public name under TYPE_CHECKING, for editors alone.
"""

import subprocess
import sys

import pytest

FLOOR_2 = tuple(
    f"rollout_engine.{name}"
    for name in (
        "_structs",
        "class_names",
        "config",
        "errors",
        "locations",
        "messages",
        "metrics",
        "outputs",
        "peer_options",
        "provenance",
        "sampling_params",
        "seeds",
    )
)
FLOOR_8 = tuple(
    f"rollout_engine.{name}"
    for name in (
        "advantages",
        "batches",
        "policy",
        "reward_functions",
        "rewards",
        "rollout_batch",
        "rollout_plan",
        "rollout_run",
        "testing",
    )
)
FLOOR_9 = ("rollout_engine.__main__", "rollout_engine.cli")
EVERYTHING = ("rollout_engine", "sync", "worker_ext")

# Package or module -> what of ours it may import, besides itself. The longest matching name on either side counts.
MAY_IMPORT = {
    "sync": (),
    "worker_ext": ("sync",),
    "rollout_engine.kernels": (),
    **{module: (*FLOOR_2, "sync.errors") for module in FLOOR_2},
    "rollout_engine.core": FLOOR_2,
    "rollout_engine.model": (*FLOOR_2, "rollout_engine.kernels"),
    # A checkpoint's files are read in one way, whether an engine loads them or an update brings them.
    **{
        f"rollout_engine.model.{name}": (*FLOOR_2, "rollout_engine.kernels", "rollout_engine.model", "sync")
        for name in ("checkpoint", "loader", "weight_table")
    },
    "rollout_engine.exact": (*FLOOR_2, "rollout_engine.exact_report", "rollout_engine.kernels", "rollout_engine.model"),
    "rollout_engine.exact_report": FLOOR_2,
    "rollout_engine.execution": (*FLOOR_2, "rollout_engine.model", "rollout_engine.exact", "sync", "worker_ext"),
    "rollout_engine.frontend": (*FLOOR_2, "rollout_engine.core", "sync"),
    # The files that see both the brain and what runs the model.
    **{
        f"rollout_engine.frontend.{name}": (
            *FLOOR_2,
            "rollout_engine.core",
            "rollout_engine.execution",
            "rollout_engine.frontend",
            "sync",
        )
        for name in ("llm_engine", "core_proc", "core_utilities", "start_up", "weight_intake")
    },
    # How weights come to their place, at a client's end too.
    "rollout_engine.frontend.weight_ends": (
        *FLOOR_2,
        "rollout_engine.execution.arrivals",
        "rollout_engine.frontend",
        "sync",
    ),
    **{module: EVERYTHING for module in (*FLOOR_8, *FLOOR_9)},
    "rollout_engine": (),
}

TORCH_FREE = (*FLOOR_2, "rollout_engine.core", "sync.errors")
HEAVY = {"torch", "tensordict", "transformers", "tokenizers", "safetensors", "socket", "zmq", "time"}


def test_every_module_has_a_floor(package_sources):
    without = [source.where for source in package_sources if _rule(source.module) is None]
    assert not without, f"name their floor in MAY_IMPORT: {without}"


def test_imports_only_go_down(package_sources):
    wrong = [
        f"{source.where}:{found.line} imports {found.name}"
        for source in package_sources
        for found in source.imports()
        if _is_ours(found.name) and not _is_for_editors(source, found) and not _allowed(source.module, found.name)
    ]
    assert not wrong, wrong


def test_our_modules_are_imported_at_the_top_of_the_file(sources):
    wrong = [
        f"{source.where}:{found.line} imports {found.name}"
        for source in sources
        for found in source.imports()
        if _is_ours(found.name) and (found.in_function or found.type_checking) and not _is_for_editors(source, found)
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


@pytest.mark.parametrize("module", ["rollout_engine", "rollout_engine.core.engine_core", *FLOOR_2])
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


def _is_for_editors(source, found) -> bool:
    return source.module == "rollout_engine" and found.type_checking


def _is_ours(name: str) -> bool:
    return _within(name, EVERYTHING)


def _within(name: str, owners: tuple[str, ...]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _rule(module: str) -> str | None:
    """The longest entry of MAY_IMPORT that covers `module`; the bare `rollout_engine` covers only itself."""
    matches = [owner for owner in MAY_IMPORT if module == owner or module.startswith(f"{owner}.")]
    owner = max(matches, key=len, default=None)
    return None if owner == "rollout_engine" != module else owner


def _allowed(module: str, target: str) -> bool:
    owner = _rule(module)
    assert owner is not None
    if target == "rollout_engine":  # the public face looks down on everybody but the command line
        return owner in FLOOR_9
    return target == owner or target.startswith(f"{owner}.") or _within(target, MAY_IMPORT[owner])
