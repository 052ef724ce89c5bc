"""Measured figures as JSON, one file per machine class and day, each figure beside how it was made."""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

from rollout_engine.cli import machine

HERE = Path(__file__).parent


def save(folder: Path, name: str, figure: dict[str, Any], versions: dict[str, Any], command: str) -> Path:
    """Add or replace one figure in today's file of this machine class under `folder`; returns the file."""
    today = datetime.date.today().isoformat()
    path = folder / machine.machine_class() / f"{today}.json"
    content = json.loads(path.read_text()) if path.exists() else {"figures": {}}
    content |= {"machine": machine.describe(), "versions": machine.versions(("torch", "transformers")) | versions}
    content["figures"][name] = figure | {"revision": _revision(), "command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _revision() -> str | None:
    """The commit measured, with "+" where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=HERE, check=True, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
