"""The directory of one run of a program, and the environment variables that it gets."""

import json
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from rollout_engine.children.guard import GUARD
from rollout_engine.rollouts.agents.agent import Agent
from rollout_engine.rollouts.agents.gateway_seam import AgentSession

logger = logging.getLogger("rollout_engine")

_INHERITED = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""Variables of this process that a program gets too; none of them is a secret."""
_MAX_TASK_BYTES = 100_000
"""Longest task that is also a variable: Linux allows 131,072 bytes."""


class Workplaces:
    """The directory that holds those of a rollout's runs. If this process is killed, the guard removes it."""

    def __init__(self) -> None:
        """Make it. Raises `OSError`."""
        self.path = Path(tempfile.mkdtemp(prefix="rollout-agents-"))
        GUARD.add_path(str(self.path))

    def remove(self) -> None:
        """Remove it with all that is in it."""
        _remove(self.path)
        GUARD.drop_path(str(self.path))


class Workplace:
    """Fresh directories for one run: to work in, for temporary files, and the file of its task. `remove` ends it."""

    def __init__(self, agent: Agent, places: Workplaces) -> None:
        """Make the directories. Raises `OSError`."""
        self._agent = agent
        self._root = Path(tempfile.mkdtemp(dir=places.path))
        self.directory = agent.directory or str(self._root / "work")
        """Where the program starts."""
        for name in ("work", "temporary"):
            (self._root / name).mkdir()

    def variables(self, session: AgentSession, task: Any, seed: int) -> dict[str, str]:
        """All environment variables of the program."""
        text, file = json.dumps(task), self._root / "task.json"
        file.write_text(text)
        found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        found |= {
            "PATH": self._agent.path,
            "HOME": str(self._root / "work"),
            "TMPDIR": str(self._root / "temporary"),
            "OPENAI_BASE_URL": session.openai_base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "ANTHROPIC_AUTH_TOKEN": session.api_key,
            "ROLLOUT_TASK_FILE": str(file),
            "ROLLOUT_SEED": str(seed),
        }
        if len(text) <= _MAX_TASK_BYTES:
            found["ROLLOUT_TASK"] = text
        return found | self._agent.variables

    def remove(self) -> None:
        """Remove the directories and all that the program has left there."""
        _remove(self._root)


def _remove(path: Path) -> None:
    """Remove a directory, and log a warning if that cannot be done."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _make_removable(path)
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("An agent left files that cannot be removed: %s", path)


def _make_removable(root: Path) -> None:
    """Allow this user to change the directories, which caches of packages like to forbid."""
    for directory, names, _ in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
