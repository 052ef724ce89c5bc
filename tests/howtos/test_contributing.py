"""The how-tos of CONTRIBUTING.md, followed letter for letter in a copy of the repository: what they add works there.

All are followed in one copy, whose tests run in one process. The tests are those that the page names: for a verb its
scenarios over every client, for an architecture parity with transformers.
"""

import faulthandler
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest

from tests.contract.sources import ROOT
from tests.howtos.page import HowTo, howtos

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
HOWTOS = {name: each for name, each in howtos(PAGE).items() if each.changes}
TESTED = {
    "verb": ("test_in_flight", "get_num_running"),
    "environment": ("test_coin", "played"),
    "HTTP route": ("test_count_in_flight", "counted"),
    "sampling parameter": ("test_banned_token_ids", "drawn"),
    "option": ("test_engine_name", "refused"),
    "metric": ("test_num_aborted", "exported"),
    "weight transport": ("test_conformance", "one_file"),
    "architecture": ("test_architectures", "arcee"),
}
"""How-to -> module and part of the name of the tests that show that it works."""
COPIED = ("rollout_engine", "sync", "worker_ext", "envs_adapters", "examples", "tests", "docs")
MAX_LINES = 40
MAX_FILE_LINES = 400
PYTEST = re.compile(r"^\.venv/bin/python -m pytest (?P<paths>.+) -k (?P<names>.+)$")
WRITE = ".venv/bin/python -m tests.contract.messages --write"
TRY = re.compile(r"^\.venv/bin/python (?P<arguments>-m tests\.models .+)$")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository in which every how-to has been followed."""
    root = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "mkdocs.yml"):
        shutil.copy2(path, root)
    for howto in HOWTOS.values():
        howto.follow(root)
    return root


def run(copy, *arguments):
    """Run Python in the copy, without the variables that this run of pytest has set.

    A test that hangs there is ended there: the watch over this test would count all of them as one.
    """
    faulthandler.cancel_dump_traceback_later()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, *arguments]
    options = dict(cwd=copy, env=environment | {"PYTHONPATH": str(copy)}, text=True)
    return subprocess.run(command, **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def outcomes(copy):
    """(module, name, outcome) of each test that the page has a contributor run, and all that they print."""
    written = run(copy, "-m", "tests.contract.messages", "--write")
    assert written.returncode == 0, written.stdout
    for command in filter(None, (TRY.match(line) for howto in HOWTOS.values() for line in howto.commands)):
        tried = run(copy, *shlex.split(command["arguments"]))
        assert tried.returncode == 0, tried.stdout
    found = [PYTEST.match(line) for howto in HOWTOS.values() for line in howto.commands]
    paths = dict.fromkeys(path for each in found if each for path in each["paths"].split())
    names = " or ".join(shlex.split(each["names"])[0] for each in found if each)
    report = copy / "report.xml"
    ran = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths, "-k", names)
    assert report.exists(), ran.stdout[-8000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [(each.get("classname"), each.get("name"), outcome_of(each)) for each in cases], ran.stdout


def outcome_of(case):
    """ "failure", "error", "skipped" or "passed"."""
    tags = [part.tag for part in case]
    return next((tag for tag in ("failure", "error", "skipped") if tag in tags), "passed")


def test_every_howto_of_the_page_is_here():
    assert set(HOWTOS) == set(TESTED)


@pytest.mark.parametrize("name", HOWTOS)
def test_a_howto_is_short_and_fits_the_files_as_they_are(name, tmp_path):
    howto = HOWTOS[name]
    assert howto.num_lines <= MAX_LINES
    assert any(PYTEST.match(line) for line in howto.commands)
    for path in howto.paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).exists():
            shutil.copy2(ROOT / path, tmp_path / path)
    howto.follow(tmp_path)
    lines = {path: (tmp_path / path).read_text(encoding="utf-8").count("\n") for path in howto.paths}
    assert not {path: count for path, count in lines.items() if path.endswith(".py") and count >= MAX_FILE_LINES}


def test_a_change_whose_place_is_gone_is_noticed(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 2\n")
    for sentence in ("In `a.py`, below `x = 1`:\n\n```python\nz = 3\n```\n", "In `a.py`, `w` becomes `v`.\n"):
        (howto,) = howtos(f"\n## How to add a thing\n\n{sentence}\n## End").values()
        with pytest.raises(AssertionError, match="2 lines are|0 times"):
            howto.follow(tmp_path)
    (howto,) = howtos(
        "\n## How to add a thing\n\nIn `a.py`, above `y = 2`:\n\n```python\nz = 3\n```\n\n## End"
    ).values()
    howto.follow(tmp_path)
    assert isinstance(howto, HowTo) and (tmp_path / "a.py").read_text() == "x = 1\nx = 1\nz = 3\ny = 2\n"


def test_what_the_howtos_add_is_formatted_like_the_rest(copy):
    paths = [path for howto in HOWTOS.values() for path in howto.paths if path.endswith(".py")]
    for command in (["check"], ["format", "--check"]):
        ran = run(copy, "-m", "ruff", *command, "--no-cache", *paths)
        assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", HOWTOS)
def test_what_a_howto_adds_works(outcomes, name):
    cases, output = outcomes
    module, part = TESTED[name]
    found = Counter(outcome for where, case, outcome in cases if where.endswith(f".{module}") and part in case)
    assert found["passed"] and not found["failure"] + found["error"], f"{module}, {part}: {found}\n{output[-8000:]}"


@pytest.mark.slow
def test_nothing_that_the_page_has_run_fails(outcomes):
    cases, output = outcomes
    assert not [case for case in cases if case[2] in ("failure", "error")], output[-8000:]


@pytest.mark.slow
def test_the_messages_have_a_new_number_where_their_fields_have_changed(copy, outcomes):
    assert all(WRITE in HOWTOS[name].commands for name in ("verb", "option", "sampling parameter", "metric"))
    kept = [root / "tests/contract/messages.json" for root in (ROOT, copy)]
    before, after = (json.loads(path.read_text(encoding="utf-8"))["protocol"] for path in kept)
    assert after == before + 1
    assert f"PROTOCOL = {after}\n" in (copy / "rollout_engine/process/wire.py").read_text(encoding="utf-8")
