"""Hooks that mkdocs calls while it builds the site: generated parts of pages, and pages from outside of docs/."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import api  # noqa: E402
import figures  # noqa: E402
import metric_tables  # noqa: E402
import options  # noqa: E402

GENERATED = {
    "api": api.markdown,
    "faults": lambda: figures.markdown("faults"),
    "figures": figures.markdown,
    "metrics": metric_tables.markdown,
    "options": options.markdown,
}
"""Name -> what stands where a page says `<!-- generated: NAME -->`."""
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
FILE_LINK = re.compile(r"\[\w+\.md\]\((\w+\.md)((?:#[^)]*)?)\)")
OUTSIDE = {
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    "CHANGELOG.md": ROOT / "rollout_engine/CHANGELOG.md",
    **{f"decisions/{path.name}": path for path in sorted((ROOT / "rollout_engine/decisions").glob("*.md"))},
}
"""Place on the site -> where the page is kept."""


def on_config(config: Any) -> Any:
    """Put the pages that the navigation does not name at the end of the guides."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    guides = next(section["Guides"] for section in config.nav if "Guides" in section)
    guides += sorted(page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in named)
    inside = next(section["Inside"] for section in config.nav if "Inside" in section)
    inside.append({"Decisions": [name for name in OUTSIDE if name.startswith("decisions/")]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are kept outside of docs/."""
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, files: Files, **_: Any) -> str:
    """Fill in what is generated, and call other pages by their titles where the text has their file's name."""
    titles = {file.src_uri: _title(file) for file in files.documentation_pages()}
    named = FILE_LINK.sub(lambda match: f"[{titles[match[1]]}]({match[1]}{match[2]})", markdown)
    return MARK.sub(lambda match: GENERATED[match[1]](), named)


def _title(file: File) -> str:
    """The first heading of a page."""
    return file.content_string.removeprefix("# ").partition("\n")[0]
