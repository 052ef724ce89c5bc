"""Reports what this machine can do, and what would let it do more.

rollout-engine doctor
rollout-engine doctor --json
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
from typing import Any

import torch

from rollout_engine import __version__
from rollout_engine.cli import machine
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import build
from rollout_engine.model.backends import unsupported_reason
from sync.transports import TRANSPORTS

_PACKAGES = ("torch", "transformers", "tensordict", "tokenizers", "safetensors", "msgspec", "numpy")
_PROBED = (1024, 1024)
"""Shape of the weight whose row plan is reported for its dtype."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Print all findings, advice last."""
    found = examine()
    print(json.dumps(found, indent=1) if arguments.json else _table(found))


def examine() -> dict[str, Any]:
    """All findings by topic; `advice` is a list of sentences, empty if nothing can be improved."""
    found = {
        "machine": machine.describe(),
        "kernels": _kernels(),
        "row_plans": {str(dtype): _row_plan(dtype) for dtype in (torch.float32, torch.bfloat16)},
        "devices": {"cpu": "yes", "cuda": _cuda()},
        "transports": list(TRANSPORTS),
        "extras": _extras(),
        "versions": {"rollout_engine": __version__} | machine.versions(_PACKAGES),
    }
    return found | {"advice": _advice(found)}


def _cuda() -> str:
    """How the first CUDA device would run models, or why it cannot."""
    device = torch.device("cuda", 0)
    if reason := unsupported_reason(device):
        return f"no: {reason}"
    found = torch.cuda.get_device_properties(device)
    return (
        f"yes: {found.name}, {found.total_memory / 2**30:.0f} GiB. Models built like Llama run by our kernels, their "
        "decode steps as CUDA graphs (cuda_graphs); the layers of others as modules, or by torch.compile (compile=true)"
    )


def _kernels() -> dict[str, Any]:
    """Whether the C++ kernels build and load, or why not."""
    problem = None
    try:
        build.open_kernels()
    except (OSError, subprocess.SubprocessError) as error:
        problem = build.reason(error)
    return {
        "compiler": shutil.which(build.COMPILER),
        "cache": str(build.cache_directory("kernels")),
        "loaded": problem is None,
        "problem": problem,
    }


def _row_plan(dtype: torch.dtype) -> dict[str, Any]:
    """How products of this dtype are made row-invariant, or why they cannot be."""
    try:
        plan = linear.plan_for(torch.zeros(_PROBED, dtype=dtype))
    except linear.NotInvariant as problem:
        return {"problem": str(problem)}
    rows = f"{plan.min_rows} to {plan.max_rows}" if plan.is_bounded else "any number"
    return {"kernel": plan.kernel, "rows at once": rows}


def _extras() -> dict[str, dict[str, bool]]:
    """Extra -> package -> whether it is installed; empty if the library itself is not installed."""
    try:
        required = importlib.metadata.requires("rollout-engine") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, bool]] = {}
    for line in required:
        if match := re.search(r"extra == ['\"](\w+)['\"]", line):
            name = re.split(r"[<>=!~;\[ ]", line)[0]
            found.setdefault(match[1], {})[name] = machine.versions([name])[name] is not None
    return found


def _advice(found: dict[str, Any]) -> list[str]:
    advice = []
    if found["kernels"]["compiler"] is None:
        cure = "xcode-select --install" if build.COMPILER == "clang++" else "Debian and Ubuntu: apt install g++"
        advice.append(f"Install {build.COMPILER} ({cure}): without it torch replaces the C++ kernels, more slowly.")
    elif not found["kernels"]["loaded"]:
        advice.append("The C++ kernels do not build or load, for the problem above; torch replaces them, more slowly.")
    if not {"avx512_bf16", "amx_bf16", "bf16"} & set(found["machine"]["isa"]):
        advice.append("This CPU has no native bfloat16: dtype=float32 is faster (dtype=auto chooses it).")
    if found["machine"]["threads"] > found["machine"]["usable_cpus"]:
        advice.append("There are more threads than usable CPUs: set num_threads or OMP_NUM_THREADS.")
    advice += [f"{dtype} is not served exactly." for dtype, plan in found["row_plans"].items() if "problem" in plan]
    return advice


def _table(found: dict[str, Any]) -> str:
    lines = []
    for topic, value in found.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for i, (name, shown) in enumerate(rows):
            lines.append(f"{topic if not i else '':12} {name:15} {_shown(shown)}".rstrip())
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
