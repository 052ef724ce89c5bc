"""Importing the package: what keeps it from working is said in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def error_of(program, cwd, **environment):
    """The last line that a program in a folder of its own prints on its standard error."""
    path = cwd / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    return done.stderr.splitlines()[-1] if done.stderr else ""


@pytest.mark.quick(6)
@pytest.mark.parametrize("shadow", ["sync.py", "worker_ext.py", "sync/__init__.py", "worker_ext/__init__.py"])
@pytest.mark.parametrize("program", ["from rollout_engine import EngineConfig", "import rollout_engine.base.errors"])
def test_a_file_that_hides_a_package_of_ours_is_named_with_the_cure(tmp_path, shadow, program):
    path = tmp_path / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("import os\n")
    package = shadow.partition("/")[0].removesuffix(".py")
    assert error_of(program, tmp_path) == (
        f"ImportError: {path} hides rollout-engine's own package '{package}': rename it, or start the program from "
        "another folder."
    )


def test_a_module_of_that_name_that_is_already_loaded_is_named_too(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sync.py").write_text("")
    program = "import sys; sys.path.insert(0, 'elsewhere'); import sync; sys.path.pop(0); import rollout_engine"
    assert "sync.py hides rollout-engine's own package 'sync'" in error_of(program, tmp_path)


def test_a_folder_of_that_name_without_code_hides_nothing(tmp_path):
    (tmp_path / "sync").mkdir()
    assert error_of("from rollout_engine import SamplingParams", tmp_path, PYTHONPATH=str(ROOT)) == ""


def test_a_folder_that_is_found_before_an_editable_installation_is_named(tmp_path):
    folder = tmp_path / "sync"
    folder.mkdir()
    # As `pip install --editable` has it: a finder of its own, asked after all of sys.path.
    program = f"""
import importlib.machinery, sys
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}]) if path is None else None
sys.path[:] = [folder for folder in sys.path if folder != {str(ROOT)!r}]
sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()] + [Editable]
import rollout_engine
"""
    assert f"{folder}/ hides rollout-engine's own package 'sync': rename it" in error_of(program, tmp_path)


def test_windows_is_refused_in_one_sentence(tmp_path):
    program = "import sys; sys.platform = 'win32'; import rollout_engine"
    assert error_of(program, tmp_path) == (
        "ImportError: rollout-engine runs on Linux and macOS, not on Windows: use WSL 2 there, which is a Linux."
    )


LOG = "import logging, rollout_engine; logging.getLogger('rollout_engine').info('a line')"


@pytest.mark.parametrize("level, told", [("", ""), ("warning", ""), ("info", "a line"), ("DEBUG", "a line")])
def test_the_log_level_comes_from_the_environment(tmp_path, level, told):
    assert error_of(LOG, tmp_path, ROLLOUT_ENGINE_LOG_LEVEL=level).removeprefix("rollout_engine: ") == told


def test_a_program_that_sets_up_logging_gets_every_line_once_and_in_its_own_form(tmp_path):
    program = LOG + "\nlogging.basicConfig(format='mine: %(message)s', level='INFO'); " + LOG.partition("; ")[2]
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = os.environ | {"ROLLOUT_ENGINE_LOG_LEVEL": "info"}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines() == ["rollout_engine: a line", "mine: a line"]


def test_an_unknown_log_level_is_refused(tmp_path):
    assert error_of("import rollout_engine", tmp_path, ROLLOUT_ENGINE_LOG_LEVEL="loud") == (
        "ValueError: ROLLOUT_ENGINE_LOG_LEVEL='loud' is not allowed: must be one of debug, info, warning, error."
    )
