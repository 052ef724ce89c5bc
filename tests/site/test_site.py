"""The site that `make docs` has built: its links lead somewhere, and no page of it asks another host for anything."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rollout_engine
from rollout_engine import EngineConfig, SamplingParams

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("object", "data")}
STYLES = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest"}
"""Kinds of <link> that a browser follows by itself."""

pytest.importorskip("mkdocs", reason="make test-site builds the site, and tests it")


class Page(HTMLParser):
    """The addresses that a page loads and links to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.anchors = [], [], set()
        self.classes = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.update(given[key] for key in ("id", "name") if given.get(key))
        self.classes.update((given.get("class") or "").split())
        self.loaded += [given[key] for where, key in LOADED if where == tag and given.get(key)]
        if tag == "link" and STYLES & set((given.get("rel") or "").split()):
            self.loaded.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def pages():
    return {path: Page(path.read_text(encoding="utf-8")) for path in PAGES}


def test_every_link_leads_to_a_page_and_an_anchor_of_it(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if path.name == "404.html" and parts.path.startswith("/"):
                target = SITE / unquote(parts.path).lstrip("/")
            anchor = unquote(parts.fragment)
            has_anchor = not anchor or target not in pages or anchor in pages[target].anchors
            if not target.exists() or not has_anchor:
                broken.append(f"{path.relative_to(SITE)} -> {link}")
    assert not broken


def test_no_page_loads_anything_from_another_host(pages):
    assert len(pages) > 30
    foreign = [
        f"{path.relative_to(SITE)}: {address}"
        for path, page in pages.items()
        for address in page.loaded
        if urlsplit(address).scheme not in ("", "data") or urlsplit(address).netloc
    ]
    assert not foreign
    assert not [path for path, page in pages.items() if "mermaid" in page.classes]  # its script would come from one


def test_no_style_and_no_picture_loads_anything_from_another_host():
    files = [*SITE.rglob("*.css"), *SITE.rglob("*.svg")]
    assert files
    reference = re.compile(r"""(?:url\(\s*["']?|@import\s+["']|href=["']|src=["'])((?:https?:)?//[^"')\s]+)""")
    assert not [
        (path.name, reference.findall(path.read_text(encoding="utf-8"))) for path in files if loads(path, reference)
    ]


def loads(path, reference):
    return reference.search(path.read_text(encoding="utf-8"))


def test_every_public_name_and_every_option_is_on_the_site(pages):
    reference = (SITE / "api.html").read_text(encoding="utf-8")
    assert not [name for name in rollout_engine._HOMES if f"rollout_engine.{name}" not in reference]
    assert "driver" not in re.findall(r"<code>(\w+)</code>", reference)
    assert "&gt;&gt;&gt; " in re.sub(r"<[^>]+>", "", reference) and "<blockquote>" not in reference
    options = (SITE / "options.html").read_text(encoding="utf-8")
    fields = [*EngineConfig.__struct_fields__, *SamplingParams.__struct_fields__]
    assert not [name for name in fields if f"<code>{name}</code>" not in options]
    assert "&lt;!-- generated" not in reference + options and "<!-- generated" not in reference + options


def test_the_search_index_is_a_script_so_that_it_works_from_the_disk():
    text = (SITE / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("var __index = "))
    assert {"exactness.html", "options.html", "api.html"} <= {
        each["location"].partition("#")[0] for each in index["docs"]
    }


def test_a_browser_without_a_network_finds_a_word_in_pages_from_the_disk():
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium")
    address = (SITE / "index.html").as_uri() + "?q=kv_min_version"
    flags = ["--headless=new", "--disable-gpu", "--virtual-time-budget=20000", "--host-resolver-rules=MAP * ~NOTFOUND"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    run = subprocess.run(
        [browser, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=300, check=True
    )
    assert re.search(
        r'class="md-search-result__link"[^>]*versions\.html|versions\.html[^>]*class="md-search-result__link"',
        run.stdout,
    )
