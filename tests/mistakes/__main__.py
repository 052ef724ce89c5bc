"""Show what mistakes say; with --write, write it to docs/mistakes.md: python -m tests.mistakes [--write] [WORD]"""

import argparse
import tempfile
from pathlib import Path

from tests.mistakes.rows import MISTAKES
from tests.mistakes.table import PAGE, page, rows, scene


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("word", nargs="?", default="", help="only mistakes with this word")
    options = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if options.word in mistake.code]
    with tempfile.TemporaryDirectory() as folder, scene(Path(folder)) as names:
        table = rows(chosen, names)
    for row in table:
        print(f"\n{row.code}\n    {row.answer}")
    if options.write and not options.word:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(table), encoding="utf-8")


run()
