"""Reports what runs fast on this machine, what falls back to something slower, and how to change that.

    rollout-engine doctor
    rollout-engine doctor Qwen/Qwen3-0.6B dtype=bfloat16
    rollout-engine doctor --json

With a model it is loaded, and the report says how its layers run, and why.
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
from rollout_engine.base.errors import ConfigError
from rollout_engine.cli import machine
from rollout_engine.cli.overrides import add_overrides, parse_overrides
from rollout_engine.cli.speed_paths import SpeedPath, of_model, row_plan, speed_paths, table
from rollout_engine.kernels.cpu import build
from rollout_engine.model.backends import unsupported_reason
from sync.own_files import cache_directory
from sync.transports import TRANSPORTS

_PAGES = {
    "other systems": "docs/comparison.md: what they have, exactness above all, and when to take which",
    "speed": "docs/performance.md: what was measured, on which machine, by which command",
}
_PACKAGES = ("torch", "transformers", "tensordict", "tokenizers", "safetensors", "msgspec", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("model", nargs="?", help="checkpoint directory or hub id, to load and report on")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print all findings; below them a table of the paths that are fast or not, and what to do."""
    overrides = parse_overrides(arguments.overrides)
    if arguments.model is None and overrides.engine:
        raise ConfigError("doctor: options are those of a model: name it first, as doctor MODEL dtype=float32.")
    found, paths = _examine()
    if arguments.model is not None:
        paths += of_model(arguments.model, overrides.engine)
    found["paths"] = [path._asdict() for path in paths]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(_table({topic: value for topic, value in found.items() if topic not in ("paths", "advice")}))
        print(f"\n{table(paths)}")


def examine() -> dict[str, Any]:
    """All findings by topic; `advice` is a list of sentences, empty if nothing can be improved."""
    return _examine()[0]


def _examine() -> tuple[dict[str, Any], list[SpeedPath]]:
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "kernels": _kernels(),
        "row_plans": {str(dtype): row_plan(dtype) for dtype in (torch.float32, torch.bfloat16)},
        "devices": {"cpu": "yes", "cuda": _cuda()},
        "transports": list(TRANSPORTS),
        "extras": _extras(),
        "versions": {"rollout_engine": __version__} | machine.versions(_PACKAGES),
        "pages": _PAGES,
    }
    paths = speed_paths(found["kernels"], found["devices"]["cuda"]) + _missing(found["extras"])
    return found | {"advice": [path.fix for path in paths if path.fix and path.state != "missing"]}, paths


def _cuda() -> str:
    """How the first CUDA device would run models, or why it cannot."""
    device = torch.device("cuda", 0)
    if reason := unsupported_reason(device):
        return f"no: {reason}"
    found = torch.cuda.get_device_properties(device)
    return (
        f"yes: {found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}. Models built like Llama "
        "run by our kernels, their decode steps as CUDA graphs (cuda_graphs); the layers of others as modules"
    )


def _kernels() -> dict[str, Any]:
    """Whether the C++ kernels load, and from which file, or why not."""
    problem, library = None, None
    try:
        library = str(build.open_kernels()._name)
    except (OSError, subprocess.SubprocessError) as error:
        problem = build.reason(error)
    return {
        "compiler": shutil.which(build.COMPILER),
        "cache": str(cache_directory("kernels")),
        "library": library,
        "loaded": problem is None,
        "problem": problem,
    }


def _extras() -> dict[str, dict[str, bool]]:
    """Extra -> package -> whether it is installed; empty if the library itself is not installed."""
    try:
        required = importlib.metadata.requires("rollout-engine") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, dict[str, bool]] = {}
    for line in required:
        if match := re.search(r"extra == ['\"]([\w-]+)['\"]", line):
            name = re.split(r"[<>=!~;\[ ]", line)[0]
            found.setdefault(match[1], {})[name] = machine.versions([name])[name] is not None
    return found


def _missing(extras: dict[str, dict[str, bool]]) -> list[SpeedPath]:
    """The extras of which a package is not installed."""
    found = []
    for extra, packages in extras.items():
        if absent := [name for name, is_there in packages.items() if not is_there]:
            fix = f'pip install "rollout-engine[{extra}]"'
            found.append(SpeedPath(f"extra {extra}", "missing", f"without {', '.join(absent)}", fix))
    return found


def _table(found: dict[str, Any]) -> str:
    lines = []
    for topic, value in found.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for i, (name, shown) in enumerate(rows):
            lines.append(f"{topic if not i else '':12} {name:15} {_format_value(shown)}".rstrip())
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
