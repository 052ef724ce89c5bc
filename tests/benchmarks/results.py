"""Saves measured figures as JSON, one file per machine class and day, each figure with the command that made it."""

import datetime
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from rollout_engine.cli import machine

HERE = Path(__file__).parent


def save(folder: Path, name: str, figure: dict[str, Any], versions: dict[str, Any], command: str) -> Path:
    """Add or replace one figure in today's file of this machine class under `folder`; returns the file."""
    today = datetime.date.today().isoformat()
    path = folder / machine_class() / f"{today}.json"
    content = json.loads(path.read_text()) if path.exists() else {"figures": {}}
    content |= {"machine": machine.describe(), "versions": machine.versions(("torch", "transformers")) | versions}
    content["figures"][name] = figure | {"revision": revision(), "command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def machine_class() -> str:
    """Name of this kind of machine, such as ``intel-xeon-processor-amx_bf16-2``: one class reaches the same figures."""
    name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", "", machine.cpu_name(), flags=re.IGNORECASE)
    isa = next(iter(machine.instruction_sets()), platform.machine())
    return "-".join([*re.findall(r"[a-z0-9.]+", name.lower()), isa, str(machine.usable_cpus())])


def revision() -> str | None:
    """The commit measured, with "+" where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=HERE, check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
