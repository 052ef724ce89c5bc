"""What the pages for readers say of the repository is so."""

import re

import pytest

from .conftest import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("rollout_engine/decisions/*.md")]
PATH = re.compile(r"`((?:rollout_engine|sync|worker_ext|envs_adapters|docs|examples|tests)/[\w/.]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    names = PATH.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in names if not (ROOT / name).exists()]


def test_readme_and_contributing_name_files():
    assert all(PATH.search((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "CONTRIBUTING.md"))
