"""Every Python block of the README and of docs/ runs as it is. The blocks of a page share a namespace.

A block below `<!-- needs: PACKAGE -->` runs by itself, behind the page's other blocks, where that package is installed.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from envs_adapters.families import FAMILIES

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
ENVIRONMENTS = DOCS / "environments.md"
ELSEWHERE = {
    "fleet.md": "replicas take seconds to start: tests/integration plays the same calls",
    "trainers.md": "runs beside each trainer, by tests/trainers/test_page.py",
}
"""Pages whose Python blocks do not run here, and why."""
BLOCK = re.compile(r"^(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [README, *(page for page in sorted(DOCS.glob("*.md")) if page.name not in ELSEWHERE)]
PAGES = [page for page in PAGES if any(not needed for needed, _ in BLOCK.findall(page.read_text()))]
NEEDED = [(page, each[0]) for page in PAGES for each in BLOCK.findall(page.read_text()) if each[0]]
CLIENTS = (("httpx2", "Client"), ("openai", "OpenAI"))
"""What pages leave open. Where pages of trainers run, the second is not installed."""


def run(page, package=None):
    """Run the blocks that need nothing more, then those of the package."""
    namespace = {"__name__": page.stem}
    text = page.read_text()
    try:
        for needed in dict.fromkeys([None, package]):
            for match in BLOCK.finditer(text):
                if match.group(1) == needed:
                    line = text[: match.start(2)].count("\n")
                    exec(compile("\n" * line + match.group(2), str(page), "exec"), namespace)
    finally:
        for value in namespace.values():
            if (type(value).__module__.partition(".")[0], type(value).__name__) in CLIENTS:
                value.close()


def test_code_comes_early():
    text = README.read_text()
    assert text[: BLOCK.search(text).start()].count("\n") < 30


def test_the_readme_is_short():
    assert README.read_text().count("\n") < 260


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "package"), NEEDED, ids=lambda each: getattr(each, "name", each))
def test_code_blocks_that_need_a_package_run(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run(page, package)


def test_the_readme_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = README.read_text()
    assert not [extra for extra in extras if f'".[{extra}]"' not in text]


def test_the_guide_has_every_family_with_its_extra():
    text = ENVIRONMENTS.read_text()
    for name, family in FAMILIES.items():
        row = re.search(rf"^\| `{name}` \|([^|]*)\|([^|]*)\|", text, re.MULTILINE)
        assert row and (f"`{family.extra}`" if family.extra else "none") in row.group(1), name
        assert f'make_env("{name}' in row.group(2), name


@pytest.mark.parametrize("page", [README, DOCS / "trainers.md"], ids=lambda page: page.name)
def test_what_a_trainer_of_trl_writes_goes_to_runs(page):
    blocks = [ast.parse(text) for _, text in BLOCK.findall(page.read_text()) if "GRPOConfig(" in text]
    calls = [each for block in blocks for each in ast.walk(block) if isinstance(each, ast.Call)]
    made = [call for call in calls if getattr(call.func, "id", "") == "GRPOConfig"]
    assert made
    for call in made:  # without these TRL leaves trainer_output/ with a checkpoint where it runs
        options = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert options["save_strategy"] == "'no'" and options["output_dir"] in ("'runs/trl'", "out")
