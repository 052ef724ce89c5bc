"""The pages for readers say of the repository what is so, and their links lead somewhere."""

import re
from collections import Counter

import pytest

from tests.contract.sources import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("rollout_engine/decisions/*.md")]
PATH = re.compile(r"`((?:rollout_engine|sync|worker_ext|envs_adapters|docs|examples|tests)/[\w/.]+)`")
NEW_FILE = re.compile(r"A new file `[^`]+`")
"""How a how-to names a file that it adds."""
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^()\s#]*)(?:#([^()\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text):
    """The anchors that GitHub and the site make of a page's headings: the same, numbered where it comes again."""
    seen, found = Counter(), set()
    for heading in HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    names = PATH.findall(NEW_FILE.sub("", page.read_text(encoding="utf-8")))
    assert not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page):
    broken = []
    for path, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / path if path else page
        there = target.exists()
        if not there or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert not broken


def test_readme_and_contributing_name_files():
    assert all(PATH.search((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "CONTRIBUTING.md"))
